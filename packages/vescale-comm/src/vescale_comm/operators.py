"""Lists what operators of torch do beside returning: writes to arguments, draws, messages.

    effects = effects_of(torch.ops.aten.add_.Tensor, {"self": x, "other": y})
    effects.writes   # frozenset({"self"})

Schemas tell, but for normalizations that update running statistics of which theirs say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

__all__ = ["Effects", "arguments_of", "effects_of"]


class Effects(NamedTuple):
    """What one call of an operator does that its results do not show.

    Attributes:
        writes: names of the arguments that it writes to, or may.
        draws: whether it moves a generator of random numbers.
        sends: whether other ranks take part.
    """

    writes: frozenset[str]
    draws: bool
    sends: bool

    def __bool__(self) -> bool:
        return bool(self.writes) or self.draws or self.sends


# By the argument that says whether statistics are those of the batch, and so are updated.
_UPDATES: Final = {
    "aten::native_batch_norm": "training",
    "aten::cudnn_batch_norm": "training",
    "aten::miopen_batch_norm": "training",
    "aten::_batch_norm_impl_index": "training",
    "aten::batch_norm": "training",
    "aten::instance_norm": "use_input_stats",
}
_STATISTICS: Final = ("running_mean", "running_var")
_COLLECTIVES: Final = ("c10d", "_dtensor", "vescale_comm")  # in names of their namespaces


def arguments_of(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the arguments of a call of an overload by name, without those that have defaults.

    Args:
        operator: of `torch.ops`, as `torch.ops.aten.add.Tensor`.
        args: of the call; nodes of a graph will do as well as values.
        kwargs: of the call.
    """
    names = [one.name for one in operator._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **(kwargs or {})}


def effects_of(operator: Any, given: Mapping[str, Any]) -> Effects:
    """Return what a call of an overload does beside what it returns.

    Args:
        operator: of `torch.ops`, as `torch.ops.aten.add_.Tensor`.
        given: its arguments by name; see `arguments_of`.
    """
    schema = operator._schema
    written = [one.name for one in schema.arguments if one.alias_info and one.alias_info.is_write]
    flag = _UPDATES.get(schema.name)
    if flag is not None and given.get(flag):
        written += [name for name in _STATISTICS if given.get(name) is not None]
    # Two ways: by the tag, and by a generator that is passed to an operator without one.
    draws = torch.Tag.nondeterministic_seeded in operator.tags
    draws = draws or any(isinstance(one, torch.Generator) for one in given.values())
    sends = any(one in operator.namespace for one in _COLLECTIVES)
    return Effects(frozenset(written), draws, sends)
