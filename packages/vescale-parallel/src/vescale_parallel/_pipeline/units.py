"""The hooks through which a pipeline sees the calls of a model's modules.

A compiler that looks into them would trace what stages exchange: it calls them as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from vescale_dtensor import untraced

from vescale_parallel._common.pickle_refusal import NotPickled
from vescale_parallel._common.torch_compat import compiler_callback, in_backward
from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.finish.outputs import Evaluates, require_no_cache
from vescale_parallel._pipeline.run.rank_stages import RankStages
from vescale_parallel._pipeline.trace.hook_results import InnerHook, hooked_within

_AS_IT_IS: Final = (
    "torch.compile runs this block of a model in stages as it is: its backend is given nothing to "
    "compile."
)
_is_compiling = torch.compiler.is_dynamo_compiling

_NO_COPY: Final = (
    "a model whose stages lie on several ranks cannot be copied. Copy it before parallelize, or "
    "copy its state_dict()."
)


def install_units(scene: RankStages, step: Evaluates) -> None:
    """Register hooks on blocks, and on modules outside of them that hold parameters.

    Args:
        scene: this rank's part.
        step: runs the model where it is called outside of a step.
    """
    for name in (*scene.split.blocks, *scene.split.stem):
        module = scene.model.get_submodule(name)
        # An attribute of the object: code that asks for the type of a block finds its own.
        module.forward = forward = UnitForward(scene, name, module, module.forward)
        scene.units.append(forward)
    refuse = _Refuse(scene)
    if scene.model._forward_pre_hooks:
        # Before hooks of `zero`, which gather: a rank that calls the model alone would wait there.
        scene.model.register_forward_pre_hook(refuse, prepend=True, with_kwargs=True)
    scene.model.forward = _Whole(scene, scene.model.forward, step, refuse)


def look_at_hooks(scene: RankStages) -> None:
    """Be called before hooks on units that others have registered, and nowhere else.

    A hook costs twice a call of a module; who sees no difference is spared it.
    """
    for unit in scene.units:
        if unit.module._forward_pre_hooks or unit.before is not None:
            unit.listen()


def watch_within(scene: RankStages) -> bool:
    """Watch modules within blocks that have forward hooks; returns whether there are any."""
    found = False
    for unit in scene.split.blocks:
        for name, module in hooked_within(scene.model.get_submodule(unit)):
            found = True
            if not any(isinstance(hook, InnerHook) for hook in module._forward_hooks.values()):
                # Behind all others: a hook may replace the result.
                module.register_forward_hook(
                    InnerHook(lambda: scene.running if scene.collects else None, unit, name),
                    with_kwargs=True,
                )
    return found


class UnitForward(NotPickled):
    """Takes the place of a unit's forward: as it was, on the stages that have the unit.

    Attributes:
        name: of the unit.
        module: it.
        forward: what it computes by.
        before: the handle of the hook that is called before those of others, where there are any:
            they see what has come from the stage before.
        leaves: whether the end of a call is seen here, and not behind hooks that were there first.
    """

    def __init__(
        self, scene: RankStages, name: str, module: nn.Module, forward: Callable[..., Any]
    ) -> None:
        self.scene, self.name, self.module, self.forward = scene, name, module, forward
        self.before: RemovableHandle | None = None
        # Those of `parallelize` may change the result, which is described as others get it.
        self.leaves = not module._forward_hooks
        if not self.leaves:
            module.register_forward_hook(_Leave(self))
        if module._forward_pre_hooks:
            self.listen()

    def listen(self) -> None:
        """Be the first of the module's hooks, as long as it has others."""
        own = 0 if self.before is None else 1
        others = len(self.module._forward_pre_hooks) - own
        if self.before is not None and not others:
            self.before.remove()
            self.before = None
        elif self.before is None and others:
            register = self.module.register_forward_pre_hook
            self.before = register(_Enter(self), prepend=True, with_kwargs=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute, or return placeholders."""
        # `untraced` written out: most calls of a step come here.
        if _is_compiling() or compiler_callback() is not None:
            return self._within_compiled(*args, **kwargs)
        running = self.scene.running
        if running is None:
            return self.forward(*args, **kwargs)
        if self.before is not None:
            return running.compute(self, args, kwargs)
        if running.quiet is not None:
            return running.quiet.call(self, args, kwargs)
        return running.call(self, args, kwargs)

    @untraced
    def _within_compiled(self, *args: Any, **kwargs: Any) -> Any:
        running = self.scene.running
        if running is None:
            return self.forward(*args, **kwargs)
        if not self.scene.is_told:
            self.scene.is_told = True
            warnings.warn(_AS_IT_IS, stacklevel=2)
        # Tensors that tell of functions that take them are none for a compiler.
        running.foreign.is_touched = True
        running.begin_to_look()
        if self.before is None:
            return running.call(self, args, kwargs)
        return running.compute(self, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise PipelineError(_NO_COPY)


class _OfUnit(NotPickled):
    def __init__(self, unit: UnitForward) -> None:
        self.unit = unit

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise PipelineError(_NO_COPY)


class _Enter(_OfUnit):
    @untraced
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        running = self.unit.scene.running
        return None if running is None else running.enter(self.unit.name, args, kwargs)


class _Leave(_OfUnit):
    @untraced
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        running = self.unit.scene.running
        if running is not None and not running.is_foreign(self.unit.name):
            running.leave(self.unit.name, output)


class _Refuse(NotPickled):
    """Refuses calls of the model itself, outside of a step, that no rank can compute."""

    def __init__(self, scene: RankStages) -> None:
        self.scene = scene

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # `untraced` written out, here and below: each forward of a stage comes here.
        if _is_compiling() or compiler_callback() is not None or self.scene.running is None:
            self.outside(kwargs)

    @untraced
    def outside(self, kwargs: Any) -> None:
        """No forward of a stage runs, or a compiler asks."""
        # In a backward it is a checkpoint that computes again, and no call of the user's.
        if self.scene.running is not None or in_backward():
            return
        if torch.is_grad_enabled():
            raise PipelineError(
                f"{type(self.scene.model).__name__} lies in stages on several ranks, so no rank "
                "can run all of it: call vescale_parallel.forward_backward(model, ...) on every "
                "rank; or, for its output alone, the model itself on every rank under "
                "torch.no_grad()."
            )
        require_no_cache(kwargs)


class _Whole(NotPickled):
    """The forward of the model itself: outside of a step, that of all stages."""

    def __init__(self, scene: RankStages, forward: Any, step: Evaluates, refuse: _Refuse) -> None:
        self.scene, self.step, self.refuse = scene, step, refuse
        # `generate` looks for the names of arguments.
        self.__wrapped__ = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling() or compiler_callback() is not None or self.scene.running is None:
            return self._outside(*args, **kwargs)
        return self.__wrapped__(*args, **kwargs)

    @untraced
    def _outside(self, *args: Any, **kwargs: Any) -> Any:
        if self.scene.running is not None or in_backward():
            return self.__wrapped__(*args, **kwargs)
        self.refuse.outside(kwargs)
        return self.step.evaluate(self.__wrapped__, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise PipelineError(_NO_COPY)
