"""Functions, and modules of a plan, that compute on each rank's own rows."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._common.pickle_refusal import NotPickled
from vescale_parallel._local_rows.call import RowsFunction, call_by_rows


def local_rows(
    function: Callable[..., Any] | None = None, *, shared: Sequence[str] = ()
) -> Callable[..., Any]:
    """Say that what a function returns for a row depends on that row alone.

    Its operators may look across rows (sorts, `nonzero`, masked selections, `index_add_`): given
    distributed tensors, each rank computes its own rows, and nothing is gathered. Without them the
    function is what it was. Rows are dim 0 of every tensor that enters or leaves, nested in lists,
    dicts and data classes too; tensors without dims, and those that are `shared`, are whole on each
    rank. A method may be declared: the parameters of its module are whole as well.

    A rank may have no rows. A parameter that no rank's rows need has a gradient of zeros.

    Not for what is of the batch: sums and counts over rows, capacities, statistics of batch norms,
    experts that choose tokens; nor for what draws random numbers, or writes to its arguments or
    buffers. `check_local_rows` proves it. Numbers that a module counts in attributes are kept;
    tensors that it keeps there are refused.

    Args:
        function: what to declare; None: returns a decorator.
        shared: names of arguments whose tensors are for all rows.

    Raises:
        ParallelError: in a call, on every rank: tensors of different numbers of rows, or kept in
            attributes.

    Examples:
        >>> @local_rows
        ... def sorted_first(x):
        ...     order = x[:, 0].argsort()
        ...     out = torch.empty_like(x)
        ...     out[order] = x[order].relu()
        ...     return out
        >>> sorted_first(torch.tensor([[2.0], [-1.0]]))
        tensor([[2.],
                [0.]])
    """
    if function is None:
        return lambda later: local_rows(later, shared=shared)
    rows = _of(function, getattr(function, "__qualname__", repr(function)), shared)

    @wraps(function)
    def by_rows(*args: Any, **kwargs: Any) -> Any:
        return call_by_rows(rows, args, kwargs)

    return by_rows


class LocalRowsForward(NotPickled):
    """The forward of a module that a plan names: each rank computes its own rows.

    Args:
        module: whose forward this replaces.
        name: of the module.
        mesh: of the activations; None: that of what it is called with.
    """

    def __init__(self, module: nn.Module, name: str, mesh: DeviceMesh | None) -> None:
        self.module, self.mesh = module, mesh
        # Of the class: the module's own `forward` is this object.
        self.rows = _of(type(module).forward, f"'{name}' ({type(module).__name__})", ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module says of the rows."""
        return call_by_rows(self.rows, (self.module, *args), kwargs, self.mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalRowsForward:
        # Of the copied module, on the same mesh: groups cannot be copied.
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(vars(self), module=copy.deepcopy(self.module, memo))
        return copied


def _of(function: Callable[..., Any], name: str, shared: Sequence[str]) -> RowsFunction:
    signature = inspect.signature(function)
    unknown = [one for one in shared if one not in signature.parameters]
    if unknown:
        raise ValueError(f"local_rows: {name} has no arguments {unknown}: {signature}.")
    return RowsFunction(function, name, signature, frozenset(shared))
