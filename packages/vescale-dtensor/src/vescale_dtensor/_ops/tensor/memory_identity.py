"""`data_ptr()`: the address of a replicated tensor, and an identity of one that is sharded.

Libraries ask for the address to find tensors that share memory: tied embeddings, seen parameters.
Of a shard the number would be this rank's, so what is given can be compared and hashed, no more.
A rank that holds nothing of a tensor has no address either: there a wrapper is equal to itself, and
different from others where it is known that they share nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from vescale_dtensor._autograd.function_results import note_plain
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.placements import Shard
from vescale_dtensor._layout.shard_geometry import owned
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.rare_state import rare_state
from vescale_dtensor._tensor.state import local_escaped
from vescale_dtensor._torch.compat import storage_identity
from vescale_dtensor._torch.worlds import cached


class Memory:
    """Stands for the memory of one wrapper, until it is given other memory.

    Attributes:
        is_separate: whether it is known that no other tensor has this memory.
    """

    __slots__ = ("is_separate",)

    def __init__(self, is_separate: bool) -> None:
        self.is_separate = is_separate


class MemoryIdentity:
    """Where the shards of a DTensor are: equal for two that share them, and equal on every rank.

    Raises:
        UnsupportedError: when compared, if a rank holds nothing of either and so cannot tell.
    """

    __slots__ = ("_place", "_spec")

    def __init__(self, place: tuple[int, int] | Memory, spec: Spec) -> None:
        self._place, self._spec = place, spec

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MemoryIdentity):
            return NotImplemented
        if self._spec != other._spec:
            return False
        if self._place == other._place:
            return True
        # By layouts and by what is said of tensors, so all ranks raise, or none.
        both = [one for one in (self._place, other._place) if isinstance(one, Memory)]
        if not all(one.is_separate for one in both):
            spec = self._spec
            raise UnsupportedError(
                f"data_ptr() of two DTensors of {spec.layout} and shape {list(spec.shape)} were "
                "compared: ranks that hold nothing of them cannot tell whether they share memory. "
                "Compare tensors by `is`, or use x.to_local() for this rank's part."
            )
        return False

    def __hash__(self) -> int:
        # Tensors that may be equal have to meet in a set, if only to be refused.
        return hash(tuple(self._spec.shape) if isinstance(self._place, Memory) else self._place)

    def __repr__(self) -> str:
        return f"<memory of a DTensor{list(self._spec.shape)}>"


def _refused(self: MemoryIdentity, *_: object) -> NoReturn:
    raise UnsupportedError(
        f"data_ptr() of a DTensor of {self._spec.layout} and shape {list(self._spec.shape)} was "
        "used as a number: no rank has the memory of the whole, so it can be compared and hashed "
        "only. Give a kernel x.to_local(), or x.full_tensor(); or x.redistribute() to Replicate."
    )


_AS_NUMBER = "index int float lt le gt ge add radd sub rsub mul rmul mod floordiv and or rshift"
for _name in (*_AS_NUMBER.split(), "format"):
    setattr(MemoryIdentity, f"__{_name}__", _refused)


def separate_memory(parameters: Iterable[Tensor]) -> None:
    """Say that no two of these, and nothing else, share memory: each has a `data_ptr()` then.

    For whoever lays out the memory of parameters, so that they can be told apart also where a rank
    holds nothing of them. It holds until they are given other memory (`p.data = x`, `p.set_(x)`).
    What is made of one (`p.data`) is identified by its memory, as ever.

    Args:
        parameters: DTensors; plain tensors are left out.
    """
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            rare_state(parameter).memory = Memory(is_separate=True)


def memories_of(parameters: Iterable[Tensor]) -> list[object]:
    """Return what stands for the memory of each; another object once it was given other memory.

    The same on every rank, also on those that hold nothing of it. Of what `separate_memory` was
    told nothing there is None.
    """
    return [one._rare.memory if isinstance(one, DTensor) else None for one in parameters]


def _data_ptr(name: str) -> Callable[[DTensor], Any]:
    def run(self: DTensor) -> Any:
        spec = self._spec
        # A kernel that has the address may write there, unseen.
        local_escaped(self)
        if spec.layout.replicated == spec.layout.active:
            note_plain()
            return getattr(self._local_tensor, name)()
        # Asked of all coordinates and not of this rank's shard, so that all ranks go by the same.
        if _some_rank_is_empty(spec.layout, tuple(spec.shape)):
            if self._rare.memory is None:
                rare_state(self).memory = Memory(is_separate=False)
            return MemoryIdentity(self._rare.memory, spec.base)
        local = self._local_tensor
        # With the spec: two shards at one address may still be parts of different global tensors.
        return MemoryIdentity((storage_identity(local), int(local.storage_offset())), spec.base)

    return run


@cached(1024)
def _some_rank_is_empty(layout: Layout, shape: Shape) -> bool:
    """Whether a rank's part has no elements: what it holds of another view looks the same then."""
    if not prod(shape):
        return True
    sharded = [p for p in layout.placements if isinstance(p, Shard)]
    dims = [p.dim for p in sharded]
    plain = all(isinstance(p, Shard) or not hasattr(p, "cut_dims") for p in layout.placements)
    if plain and len(set(dims)) == len(dims):
        sizes = zip(layout.placements, layout.sizes, strict=True)
        if all(not shape[p.dim] % n for p, n in sizes if isinstance(p, Shard)):
            return False
    # Ragged and nested shards: no short rule, so each coordinate is asked for its extents.
    coordinates = product(*map(range, layout.sizes))
    return any(
        not prod(group.extent for group in owned(layout.placements, layout.sizes, shape, place))
        for place in coordinates
    )


HANDLERS: dict[Any, Callable[..., Any]] = {
    getattr(torch.Tensor, name): _data_ptr(name)
    for name in ("data_ptr", "const_data_ptr")
    if hasattr(torch.Tensor, name)
}
"""Functions this module answers for."""
