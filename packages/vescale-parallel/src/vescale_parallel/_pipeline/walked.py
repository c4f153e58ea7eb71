"""The modules and parameters of a model, walked once in a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vescale_dtensor import local_leaves

from vescale_parallel._common.torch_compat import any_hooks, hooks_of
from vescale_parallel._pipeline.finish import Trained
from vescale_parallel._zero.schedule import SCHEDULE


class Walked(NamedTuple):
    """The modules and parameters of a model, walked once in a step: there are thousands.

    Attributes:
        training: whether each module is in train mode.
        named: each parameter once, by its first name, in the order of `named_parameters`.
        leaves: the local tensor of each, in that order.
        flags: what models of Hugging Face are asked for by their configuration, beside arguments.
        is_compiled: whether torch.compile runs the model, or a module of it.
    """

    training: tuple[bool, ...]
    named: dict[str, nn.Parameter]
    leaves: tuple[Tensor, ...]
    flags: tuple[str, ...] = ()
    is_compiled: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> Walked:
        """Walk through a model."""
        named: dict[str, nn.Parameter] = {}
        training: list[bool] = []
        is_compiled = False
        seen, walked, stored = set(), set(), _stored_beside(model)
        # `named_modules` by hand, in its order: its generators would be half of all calls of a
        # step.
        left: list[tuple[str, nn.Module]] = [("", model)]
        while left:
            prefix, module = left.pop()
            if id(module) in walked:
                continue
            walked.add(id(module))
            training.append(module.training)
            is_compiled = is_compiled or module._compiled_call_impl is not None
            for name, held in module._parameters.items():
                one = stored.get((id(module), name), held) if stored else held
                if one is not None and id(one) not in seen:
                    seen.add(id(one))
                    named[prefix + name] = one
            below = module._modules
            if below:
                is_compiled = is_compiled or "_orig_mod" in below  # what torch.compile returns
                left += [(f"{prefix}{n}.", m) for n, m in reversed(below.items()) if m is not None]
        leaves = tuple(local_leaves(named.values()))
        return cls(tuple(training), named, leaves, _flags_of(model), is_compiled)

    def trained(self) -> Trained:
        """The parameters that get gradients."""
        pairs = zip(self.named.values(), self.leaves, strict=True)
        found = [(one, leaf) for one, leaf in pairs if leaf.requires_grad]
        return Trained([one for one, _ in found], [leaf for _, leaf in found])

    def hooked(self) -> list[str]:
        """Names of parameters on which somebody has registered hooks."""
        if not any_hooks(self.leaves):
            return []
        return [n for n, leaf in zip(self.named, self.leaves, strict=True) if hooks_of(leaf)]

    def modes(self, device: str) -> tuple[object, ...]:
        """What decides beside shapes what a model draws, in which dtypes, where gradients go."""
        trained = tuple([leaf.requires_grad for leaf in self.leaves])
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        # A rehearsal under inference_mode sees nothing that needs a gradient.
        return self.training, trained, cast, torch.is_inference_mode_enabled(), self.flags


def _stored_beside(model: nn.Module) -> dict[tuple[int, str], Any]:
    """The stored parameters, by module and name, where modules hold gathered ones.

    In a forward of the model itself zero has gathered what its first unit holds on this rank, and
    ranks of other stages hold others.
    """
    zero = getattr(model, SCHEDULE, None)
    units = () if zero is None else zero.units
    held = [one for unit in units if unit.is_swapped for one in unit.held]
    return {(id(module), name): one.stored for one in held for module, name in one.places}


def _flags_of(model: nn.Module) -> tuple[str, ...]:
    """Which results are asked for: a loss of routers is, by `config.output_router_logits`."""
    words = getattr(getattr(model, "config", None), "__dict__", {})
    return tuple([f"{k}={v}" for k, v in words.items() if str(k).lstrip("_").startswith("output_")])
