"""One call of a function of rows: distributed tensors enter as this rank's rows, and leave so."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm.nested import map_tensors, named_tensors_within
from vescale_dtensor import DTensor, Partial, Replicate, untraced

from vescale_parallel._common.messages import listed
from vescale_parallel._common.twins import local_twin, take_over_attributes
from vescale_parallel._errors import ParallelError

Placements = tuple[Any, ...]


@dataclass(frozen=True)
class RowsFunction:
    """A function whose result for a row depends on that row alone.

    Attributes:
        function: takes and returns tensors, nested as they like, whose dim 0 counts the rows.
        name: in messages.
        signature: of the function.
        shared: arguments that have no rows of their own, and are whole on each rank.
    """

    function: Callable[..., Any]
    name: str
    signature: inspect.Signature
    shared: frozenset[str]


Prove = Callable[[RowsFunction, inspect.BoundArguments], None]
# What looks at each call before it is made, while a batch is proven.
_PROVE: ContextVar[Prove | None] = ContextVar("prove", default=None)


@contextmanager
def proving(prove: Prove | None) -> Iterator[None]:
    """Let `prove` see the arguments of every call within the block; None: nobody does."""
    token = _PROVE.set(prove)
    try:
        yield
    finally:
        _PROVE.reset(token)


@untraced
def call_by_rows(rows: RowsFunction, args: Any, kwargs: Any, mesh: DeviceMesh | None = None) -> Any:
    """Return what the function says, computed by each rank for its own rows.

    Args:
        rows: the function; modules among its arguments compute with their whole parameters.
        args: of the call.
        kwargs: of the call.
        mesh: of the activations; None: of the first distributed tensor.

    Raises:
        ParallelError: alike on every rank: an argument or a result has no such rows.
    """
    bound = rows.signature.bind(*args, **kwargs)
    prove = _PROVE.get()
    if prove is not None:
        # What is proven of the whole is proven of what it calls.
        with proving(None):
            prove(rows, bound)
            return call_by_rows(rows, args, kwargs, mesh)
    found = [one for one in _everything(bound) if isinstance(one, DTensor)]
    if not found:
        return rows.function(*args, **kwargs)
    mesh = found[0].device_mesh if mesh is None else mesh
    first = _distributed(leading_rows(rows, bound), mesh)
    entry = _Entry(mesh, _own_rows(first.placements))
    for name, value in bound.arguments.items():
        bound.arguments[name] = entry.of(value, shared=name in rows.shared)
    said = rows.function(*bound.args, **bound.kwargs)
    for module, twin in entry.twins:
        take_over_attributes(module, twin, rows.name)
    return _left(rows, said, entry, len(first))


def leading_rows(rows: RowsFunction, bound: inspect.BoundArguments) -> Tensor:
    """Return the first tensor that has rows; all others have as many.

    Raises:
        ParallelError: there is none, or another one has other rows.
    """
    found: dict[str, Tensor] = {}
    for name, value in bound.arguments.items():
        if name not in rows.shared and not isinstance(value, nn.Module):
            found |= {n: t for n, t in named_tensors_within(value, name).items() if t.ndim}
    first = next(iter(found), None)
    if first is None:
        raise ParallelError(f"{rows.name}: no argument is a tensor with rows: {rows.signature}.")
    count = len(found[first])
    other = {n: tuple(t.shape) for n, t in found.items() if len(t) != count}
    if other:
        raise ParallelError(
            f"{rows.name}: '{first}' has {count} rows, and {listed(other)} of shapes "
            f"{[*other.values()]} have others. Name arguments that are for all rows: "
            "local_rows(function, shared=('name',))."
        )
    return found[first]


def tie(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the results, computed from all inputs as far as autograd knows.

    An input that the rows of one rank did not need has a gradient of zeros there: without one this
    rank would take no part in its sum, and the others would wait.
    """
    needed = [one for one in inputs if one.requires_grad]
    if not (needed and results and torch.is_grad_enabled()):
        return list(results)
    return list(_Tied.apply(len(results), *results, *needed))  # type: ignore[no-untyped-call]


class _Tied(Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Any:
        ctx.inputs = [(one.shape, one.dtype, one.device) for one in tensors[count:]]
        return tuple(one.detach() for one in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # One element in memory, however large the parameter is.
        zeros = [
            torch.zeros((), dtype=dtype, device=device).expand(shape)
            for shape, dtype, device in ctx.inputs
        ]
        return None, *gradients, *zeros


class _Entry:
    """What enters a function: local tensors, each by rows or whole.

    Attributes:
        mesh: of the activations.
        where: placements of the rows.
        own: how many of them this rank has.
        tensors: all that have entered.
        twins: modules that have, each with what computes in its place.
    """

    def __init__(self, mesh: DeviceMesh, where: Placements) -> None:
        self.mesh, self.where, self.own = mesh, where, 0
        self.tensors: list[Tensor] = []
        self.twins: list[tuple[nn.Module, Any]] = []

    def of(self, value: Any, *, shared: bool) -> Any:
        """Return an argument with local tensors; a module computes with them."""
        if not isinstance(value, nn.Module):
            return map_tensors(self._whole if shared else self._by_rows, value)
        parameters = value.named_parameters(remove_duplicate=False)
        twin = local_twin(value, {name: self._whole(one) for name, one in parameters})
        self.twins.append((value, twin))
        return twin

    def _by_rows(self, tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return self._whole(tensor)
        local = self._local(tensor, self.where)
        self.own = len(local)
        return local

    def _whole(self, tensor: Tensor) -> Tensor:
        return self._local(tensor, (Replicate(),) * self.mesh.ndim)

    def _local(self, tensor: Tensor, placements: Placements) -> Tensor:
        placed = _distributed(tensor, self.mesh).redistribute(self.mesh, placements)
        # What is whole on ranks that have different rows gets a part of its gradient from each.
        gradient = [
            Partial() if mine.is_replicate() and rows.is_sharded() else mine
            for mine, rows in zip(placements, self.where, strict=True)
        ]
        local: Tensor = placed.to_local(grad_placements=gradient)
        self.tensors.append(local)
        return local


def _left(rows: RowsFunction, said: Any, entry: _Entry, count: int) -> Any:
    """Return the local results as distributed tensors of `count` rows."""
    results = named_tensors_within(said, "result")
    require_rows(rows, results, entry.own)
    left = iter(tie([one for one in results.values() if is_trained(one)], entry.tensors))

    def leave(one: Tensor) -> Tensor:
        local = next(left) if is_trained(one) else one
        shape = (count, *one.shape[1:])
        found: Tensor = DTensor.from_local(local, entry.mesh, entry.where, shape=shape)
        return found

    return map_tensors(leave, said)


def require_rows(rows: RowsFunction, results: Mapping[str, Tensor], count: int) -> None:
    """Refuse results that are not of these rows.

    Raises:
        ParallelError: there are some.
    """
    wrong = {n: tuple(t.shape) for n, t in results.items() if not t.ndim or len(t) != count}
    if wrong or not results:
        raise ParallelError(
            f"{rows.name}: it returned {listed(wrong) or 'no tensor'} {[*wrong.values()]} for "
            f"{count} rows. Return what is of each row, and sum it outside."
        )


def is_trained(tensor: Tensor) -> bool:
    """Whether a tensor is of a dtype that has gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def _everything(bound: inspect.BoundArguments) -> list[Tensor]:
    found: list[Tensor] = []
    for name, value in bound.arguments.items():
        modules = isinstance(value, nn.Module)
        found += value.parameters() if modules else named_tensors_within(value, name).values()
    return found


def _own_rows(placements: Sequence[Any]) -> Placements:
    """Where rows are while the function computes: as they came, where whole rows are sharded."""
    return tuple(
        one if one.is_sharded() and one.cut_dims() == (0,) else Replicate() for one in placements
    )


def _distributed(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    if isinstance(tensor, DTensor):
        found: DTensor = tensor
        return found
    # Plain tensors count as replicated, as everywhere.
    everywhere = [Replicate()] * mesh.ndim
    found = DTensor.from_local(tensor, mesh, everywhere, run_check="sampled")
    return found
