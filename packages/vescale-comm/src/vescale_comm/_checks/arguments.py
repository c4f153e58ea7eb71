"""Checks of arguments that a rank can make by itself, before anything is sent."""

from collections.abc import Sequence
from functools import lru_cache
from operator import index
from typing import Any

import torch
from torch import Tensor

from vescale_comm._errors import CommArgumentError
from vescale_comm._groups.group import Group

Shape = tuple[int, ...]


def check_tensor(op: str, x: object, group: Group) -> None:
    """Check that `x` is a dense tensor on a device that the group's backend serves."""
    if type(x) is not Tensor:
        if not isinstance(x, Tensor):
            raise CommArgumentError(f"{op} takes a tensor, not {type(x).__name__}")
        # A subclass of Tensor over many ranks: its memory is not its values, and sending it would
        # be silently wrong.
        if hasattr(x, "to_local"):
            raise CommArgumentError(
                f"{op} takes what one rank holds; this is a {type(x).__name__}, a tensor over many "
                "ranks: pass x.to_local()"
            )
    if x.layout is not torch.strided:
        raise CommArgumentError(f"{op} takes a dense tensor, not one of layout {x.layout}")
    if x.is_quantized or not _can_be_copied(x.dtype):
        raise CommArgumentError(
            f"{op}: torch does not copy tensors of {x.dtype}, and what is sent is copied: view it "
            "as another dtype"
        )
    if x.device.type not in group.backends:
        served = ", ".join(f"{device} ({name})" for device, name in group.backends.items())
        raise CommArgumentError(
            f"{op} over {group.name}: the tensor is on {x.device}, and the group communicates from "
            f"{served}"
        )


@lru_cache(maxsize=128)
def _can_be_copied(dtype: torch.dtype) -> bool:
    """Some dtypes are only names, such as torch.uint4: found out here, or one rank would hang."""
    try:
        torch.empty(1, dtype=dtype, device="cpu").clone()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def check_dim(op: str, dim: int, shape: Shape) -> int:
    """Return `dim` counted from the front."""
    if not shape:
        raise CommArgumentError(
            f"{op} works along a dim, and a 0-dim tensor has none: reshape it to (1,)"
        )
    # Not isinstance(int): a tracer's symbols and numpy's integers are indices too.
    if not hasattr(dim, "__index__") or not -len(shape) <= dim < len(shape):
        raise CommArgumentError(f"{op}: dim {dim} is out of range for shape {shape}")
    return dim % len(shape)


def check_sizes(op: str, sizes: Sequence[int], group: Group) -> Shape:
    """Return the extents of the members' shards as a tuple, one for each member."""
    result = whole_numbers(op, "sizes", sizes)
    if len(result) != group.size:
        raise CommArgumentError(
            f"{op}: sizes={result} has {len(result)} entries, but {group.name} has {group.size} "
            "members"
        )
    # Zero is allowed: a rank may hold nothing, and still takes part.
    if min(result) < 0:
        raise CommArgumentError(f"{op}: sizes={result} has a negative entry")
    return result


def check_shapes(op: str, shapes: Sequence[Sequence[int]], group: Group) -> tuple[Shape, ...]:
    """Return the shapes of the members' tensors as tuples, one for each member."""
    result = tuple(whole_numbers(op, "shapes", shape) for shape in shapes)
    if len(result) != group.size:
        raise CommArgumentError(
            f"{op}: shapes has {len(result)} entries, but {group.name} has {group.size} members"
        )
    negative = [shape for shape in result if any(extent < 0 for extent in shape)]
    if negative:
        raise CommArgumentError(f"{op}: shapes has {negative[0]}, with a negative extent")
    return result


def whole_numbers(op: str, name: str, numbers: object) -> Shape:
    """Return numbers as a tuple of integers; what is close to one is refused."""
    try:
        given: tuple[Any, ...] = tuple(numbers)  # type: ignore[arg-type]
        # Nearly always integers already, and as many as there are ranks: no call for each of them.
        if set(map(type, given)) <= {int}:
            return given
        # `index` and not `int`: int(1.9) is 1, and the ranks would send different sizes.
        return tuple(index(number) for number in given)
    except TypeError:
        raise CommArgumentError(f"{op}: {name} takes whole numbers, not {numbers!r}") from None


def check_pair(pair: object) -> tuple[int, int]:
    """Return a pair of members, (from, to)."""
    found = whole_numbers("permute", "each of pairs", pair)
    if len(found) != 2:
        raise CommArgumentError(f"permute: each of pairs is (from, to), not {pair!r}")
    return found[0], found[1]


def check_own(op: str, name: str, given: object, found: object, group: Group) -> None:
    """Check what a caller says about the tensor of this rank itself."""
    if given != found:
        raise CommArgumentError(
            f"{op} over {group.name}: {name}[{group.rank}] is {given}, but this rank (member "
            f"{group.rank}) holds {found}"
        )


def check_member(op: str, name: str, member: int, group: Group) -> None:
    """Check that there is such a member."""
    if not hasattr(member, "__index__") or not 0 <= member < group.size:
        raise CommArgumentError(
            f"{op}: {name}={member} is not a member of {group.name}, which counts 0 to "
            f"{group.size - 1}"
        )
