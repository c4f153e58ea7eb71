"""The collectives as operators, which is how `torch.compile` meets them.

Its tracer writes an operator down without looking inside, and the next stage then runs these bodies
under its own modes: the same code as without it, with the functional collectives at the bottom.
Nothing here depends on what the tracer understands of Python. Groups are named, as torch's
functional collectives name them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._torch.compat import process_group_named

# Kept for as long as the process runs: with it the operators would be gone.
_library: Any = torch.library.Library("vescale_comm", "FRAGMENT")  # type: ignore[no-untyped-call]
_ops: Any = torch.ops.vescale_comm


def register(schema: str, body: Callable[..., Any], *, groups: tuple[int, ...] = (1,)) -> None:
    """Register a function, which is made of operators, under a schema.

    Args:
        schema: as torch writes it. A graph holds no group, so it says `str` for one.
        body: takes what the schema says, with groups in the place of their names.
        groups: positions of the arguments that are groups.
    """
    name = schema.partition("(")[0]
    if hasattr(_ops, name):  # a module may be imported anew, a process has one registry
        return

    def _with_groups(*args: Any) -> Any:
        given = list(args)
        for at in groups:
            given[at] = group_named(given[at])
        return body(*given)

    _library.define(schema)
    # Composite: it has no kernel and no gradient of its own, its parts have.
    _library.impl(name, _with_groups, "CompositeImplicitAutograd")


def name_of(group: GroupLike) -> str:
    """Return the name by which an operator takes a group; the default one is ""."""
    if group is None:
        return ""
    name: str = group.tag if isinstance(group, Group) else group.group_name
    return name


def group_named(group: str) -> Group:
    """Return the group that an operator was given."""
    return as_group(process_group_named(group) if group else None)


def flat_shapes(shapes: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return shapes as an operator takes them: the number of dims of each, and all extents."""
    return [len(shape) for shape in shapes], [extent for shape in shapes for extent in shape]


def shapes_of(dims: Sequence[int], extents: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the reverse of `flat_shapes`."""
    rest = iter(extents)
    return [tuple(next(rest) for _ in range(count)) for count in dims]


class FinishedHandle:
    """Stands for a `Pending` where there is nothing to wait for.

    Such as in what is compiled: the compiler moves the waiting by itself.
    """

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        """Return the result."""
        return self._result


def call(name: str, *args: Any, async_op: bool = False) -> Any:
    """Call an operator, for a function that finds itself being compiled."""
    result = getattr(_ops, name)(*args)
    return FinishedHandle(result) if async_op else result
