"""The hooks through which a pipeline sees the calls of a model's modules.

A compiler that looks into them would trace what stages exchange: it calls them as they are.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from vescale_dtensor import untraced

from vescale_parallel._common.torch_compat import in_backward
from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.collected import Within, hooked_within
from vescale_parallel._pipeline.outputs import Evaluates, require_no_cache
from vescale_parallel._pipeline.stage import Scene

_NO_COPY: Final = (
    "a model whose stages lie on several ranks cannot be copied. Copy it before parallelize, or "
    "copy its state_dict()."
)


def install_units(scene: Scene, step: Evaluates) -> None:
    """Register hooks on blocks, and on modules outside of them that hold parameters.

    Args:
        scene: this rank's part.
        step: runs the model where it is called outside of a step.
    """
    for name in (*scene.split.blocks, *scene.split.stem):
        module = scene.model.get_submodule(name)
        # First of all: other hooks of the module see what has come from the stage before.
        module.register_forward_pre_hook(_Enter(scene, name), prepend=True, with_kwargs=True)
        module.register_forward_hook(_Leave(scene, name))
        # An attribute of the object: code that asks for the type of a block finds its own.
        module.forward = _Forward(scene, name, module.forward)
    scene.model.register_forward_pre_hook(_Refuse(scene), prepend=True, with_kwargs=True)
    scene.model.forward = _Whole(scene, scene.model.forward, step)


def watch_within(scene: Scene) -> bool:
    """Hear of modules within blocks that have forward hooks; returns whether there are any."""
    found = False
    for unit in scene.split.blocks:
        for name, module in hooked_within(scene.model.get_submodule(unit)):
            found = True
            if not any(isinstance(hook, Within) for hook in module._forward_hooks.values()):
                # Behind all others: a hook may replace the result.
                module.register_forward_hook(
                    Within(lambda: scene.running if scene.collects else None, unit, name),
                    with_kwargs=True,
                )
    return found


class _OfScene:
    def __init__(self, scene: Scene, name: str) -> None:
        self.scene, self.name = scene, name

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise PipelineError(_NO_COPY)


class _Enter(_OfScene):
    @untraced
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        running = self.scene.running
        return None if running is None else running.enter(self.name, args, kwargs)


class _Leave(_OfScene):
    @untraced
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        running = self.scene.running
        if running is not None and not running.is_foreign(self.name):
            running.leave(self.name, output)


class _Forward(_OfScene):
    def __init__(self, scene: Scene, name: str, forward: Any) -> None:
        super().__init__(scene, name)
        self.forward = forward

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = self.scene.running
        if running is not None and running.is_foreign(self.name):
            return running.stand_in(self.name)
        return self.forward(*args, **kwargs)


class _Refuse:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    @untraced
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.scene.running is not None or in_backward():
            return
        if torch.is_grad_enabled():
            raise PipelineError(
                f"{type(module).__name__} lies in stages on several ranks, so no rank can run all "
                "of it: call vescale_parallel.forward_backward(model, ...) on every rank; or, for "
                "its output alone, the model itself on every rank under torch.no_grad()."
            )
        require_no_cache(kwargs)


class _Whole:
    """The forward of the model itself: outside of a step, that of all stages."""

    def __init__(self, scene: Scene, forward: Any, step: Evaluates) -> None:
        self.scene, self.step = scene, step
        # `generate` looks for the names of arguments.
        self.__wrapped__ = forward

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.scene.running is not None or in_backward():
            return self.__wrapped__(*args, **kwargs)
        return self.step.evaluate(self.__wrapped__, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise PipelineError(_NO_COPY)
