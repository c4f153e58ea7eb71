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


def operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function, which is made of operators, under its schema."""

    def _register(body: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        if not hasattr(_ops, name):  # a module may be imported anew, a process has one registry
            _library.define(schema)
            _library.impl(name, body, "CompositeImplicitAutograd")
        return body

    return _register


def name_of(group: GroupLike) -> str:
    """Returns what an operator calls a group; the default one is ""."""
    if group is None:
        return ""
    name: str = group.tag if isinstance(group, Group) else group.group_name
    return name


def named(group: str) -> Group:
    """Returns the group that an operator was given."""
    return as_group(process_group_named(group) if group else None)


def flat_shapes(shapes: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Returns shapes as an operator takes them: the number of dims of each, and all extents."""
    return [len(shape) for shape in shapes], [extent for shape in shapes for extent in shape]


def shapes_of(dims: Sequence[int], extents: Sequence[int]) -> list[tuple[int, ...]]:
    """The reverse of `flat_shapes`."""
    rest = iter(extents)
    return [tuple(next(rest) for _ in range(count)) for count in dims]


class Finished:
    """Stands for a `Pending` where there is nothing to wait for.

    Such as in what is compiled: the compiler moves the waiting by itself.
    """

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        """Returns the result."""
        return self._result


def call(name: str, *args: Any, async_op: bool = False) -> Any:
    """Calls an operator, for a function that finds itself being compiled."""
    result = getattr(_ops, name)(*args)
    return Finished(result) if async_op else result
