"""Checks of arguments that a rank can make by itself, before anything is sent."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vescale_comm._errors import CommArgumentError
from vescale_comm._group import Group

Shape = tuple[int, ...]


def check_tensor(op: str, x: object, group: Group) -> None:
    """Checks that `x` is a dense tensor on a device that the group's backend serves."""
    if type(x) is not Tensor:
        if not isinstance(x, Tensor):
            raise CommArgumentError(f"{op} takes a tensor, not {type(x).__name__}")
        if hasattr(x, "to_local"):
            raise CommArgumentError(
                f"{op} takes what one rank holds; this is a {type(x).__name__}, a tensor over many "
                "ranks: pass x.to_local()"
            )
    if x.layout is not torch.strided:
        raise CommArgumentError(f"{op} takes a dense tensor, not one of layout {x.layout}")
    if x.device.type not in group.backends:
        served = ", ".join(f"{device} ({name})" for device, name in group.backends.items())
        raise CommArgumentError(
            f"{op} over {group.name}: the tensor is on {x.device}, and the group communicates from "
            f"{served}"
        )


def check_dim(op: str, dim: int, shape: Shape) -> int:
    """Returns `dim` counted from the front."""
    if not shape:
        raise CommArgumentError(
            f"{op} works along a dim, and a 0-dim tensor has none: reshape it to (1,)"
        )
    if not -len(shape) <= dim < len(shape):
        raise CommArgumentError(f"{op}: dim {dim} is out of range for shape {shape}")
    return dim % len(shape)


def check_sizes(op: str, sizes: Sequence[int], group: Group) -> Shape:
    """Returns the extents of the members' pieces as a tuple, one for each member."""
    result = tuple(int(size) for size in sizes)
    if len(result) != group.size:
        raise CommArgumentError(
            f"{op}: sizes={result} has {len(result)} entries, but {group.name} has {group.size} "
            "members"
        )
    if any(size < 0 for size in result):
        raise CommArgumentError(f"{op}: sizes={result} has a negative entry")
    return result


def check_shapes(op: str, shapes: Sequence[Sequence[int]], group: Group) -> tuple[Shape, ...]:
    """Returns the shapes of the members' pieces as tuples, one for each member."""
    result = tuple(tuple(int(extent) for extent in shape) for shape in shapes)
    if len(result) != group.size:
        raise CommArgumentError(
            f"{op}: shapes has {len(result)} entries, but {group.name} has {group.size} members"
        )
    return result


def check_own(op: str, name: str, given: object, found: object, group: Group) -> None:
    """Checks that what is said about this rank's own piece is what this rank holds."""
    if given != found:
        raise CommArgumentError(
            f"{op} over {group.name}: {name}[{group.rank}] is {given}, but this rank (member "
            f"{group.rank}) holds {found}"
        )


def check_member(op: str, name: str, member: int, group: Group) -> None:
    """Checks that there is such a member."""
    if not 0 <= member < group.size:
        raise CommArgumentError(
            f"{op}: {name}={member} is not a member of {group.name}, which counts 0 to "
            f"{group.size - 1}"
        )
