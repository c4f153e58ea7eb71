"""Recognises modules of experts: a stack of weights, and how its products may be sharded.

Such a module is called with hidden states (tokens, width), the experts that each token chose
(tokens, k), and their weights (tokens, k), and returns what they say, summed (tokens, width). Its
own parameters are stacks: their first dim counts the experts; so are those of modules inside it
that make such parameters (an adapter around a stack, a parametrization).

Hugging Face's modules say how their stacks lie by attributes that `use_experts_implementation`
gives them; modules without these are known by their shapes, and by name in the plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

_DECLARED: Final = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_EAGER: Final = "eager"
_GROUPED_BYTES: Final = 16
"""What torch's grouped products ask of the strides of their operands."""


@dataclass(frozen=True)
class Kind:
    """How a module of experts computes.

    Attributes:
        experts: how many.
        stacks: names of its parameters, and of those inside, that are stacks over the experts.
        ordered: whether what the experts of a token say is added in the order of the experts, one
            after another; otherwise as one sum over the choices.
        up: names of the stacks that lead away from the width, by the dim of their outputs.
        down: the stack that leads back, by the dim of its inputs.
        behind: stacks that are added behind that: counted once where its products are sharded.
        blocks: proportions of blocks of the outputs of `up`, each sharded by itself.
        pairs: whether outputs of `up` belong together in pairs, one beside the other.
        alignment: of how many bytes rows of a stack have to be a multiple.
    """

    experts: int
    stacks: tuple[str, ...]
    ordered: bool
    up: tuple[tuple[str, int], ...] = ()
    down: tuple[tuple[str, int], ...] = ()
    behind: tuple[str, ...] = ()
    blocks: tuple[int, ...] = (1,)
    pairs: bool = False
    alignment: int = 1


def is_known(module: nn.Module) -> bool:
    """Return whether a module says by itself that it holds experts."""
    said = vars(module)
    return isinstance(said.get("num_experts"), int) and all(name in said for name in _DECLARED)


def kind_of(module: nn.Module) -> Kind | str:
    """Return how a module of experts computes, or in words why it is none."""
    # With `self`, which a function of the class has.
    if len(inspect.signature(type(module).forward).parameters) < 4:
        return "its forward does not take tokens, the experts that they chose, and their weights"
    own = dict(_shapes(module, ""))
    said = getattr(module, "num_experts", None)
    firsts = {shape[0] for shape in own.values() if len(shape) > 1}
    count = said if isinstance(said, int) else next(iter(firsts)) if len(firsts) == 1 else None
    if count is None:
        return "it has no 'num_experts', and its parameters have no first dim in common"
    stacks = tuple(name for name, shape in own.items() if len(shape) > 1 and shape[0] == count)
    if not stacks:
        return f"none of its parameters is a stack of {count} experts"
    if not is_known(module):
        return Kind(count, stacks, ordered=True)
    return _declared(module, count, stacks)


def _shapes(module: nn.Module, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Shapes of parameters that may be stacks, by name, down to those that adapters hold."""
    for name, one in module.named_parameters(recurse=False, remove_duplicate=False):
        yield prefix + name, tuple(one.shape)
    for name, child in module._modules.items():
        # A layer of torch's is no expert of many: its first dim may count as many by chance.
        kind = type(child).__module__
        is_layer = kind.startswith("torch.nn.modules.") and not kind.endswith(".container")
        if child is not None and not is_layer:
            yield from _shapes(child, f"{prefix}{name}.")


def _declared(module: Any, count: int, stacks: tuple[str, ...]) -> Kind:
    # One device's order: that of the implementation which the configuration names.
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    ordered = chosen == _EAGER
    name = "gate_up_proj" if module.has_gate else "up_proj"
    known = {name, f"{name}_bias", "down_proj", "down_proj_bias"}
    # Norms behind each expert need whole rows; other stacks are not known here.
    if getattr(module, "has_post_expert_norm", False) or set(stacks) - known:
        return Kind(count, stacks, ordered)
    if not {name, "down_proj"} <= set(stacks):
        return Kind(count, stacks, ordered)
    outputs, inputs = (2, 1) if module.is_transposed else (1, 2)
    up = [(name, outputs)] + [(f"{name}_bias", 1)] * (f"{name}_bias" in stacks)
    return Kind(
        count,
        stacks,
        ordered,
        up=tuple(up),
        down=(("down_proj", inputs),),
        behind=tuple(one for one in ("down_proj_bias",) if one in stacks),
        blocks=(1, 1) if module.has_gate and module.is_concatenated else (1,),
        pairs=module.has_gate and not module.is_concatenated,
        # Eager products go expert by expert, and take rows that begin anywhere.
        alignment=1 if chosen in (None, _EAGER) else _GROUPED_BYTES,
    )
