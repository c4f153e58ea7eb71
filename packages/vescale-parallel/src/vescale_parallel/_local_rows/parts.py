"""Checks that rows are independent in one call: compares the whole with its parts.

The parts are those that ranks could have: of unequal sizes, one without rows; and all rows in the
reverse order.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from vescale_comm.nested import map_tensors, named_tensors_within
from vescale_dtensor import DTensor

from vescale_parallel._common.twins import assigned_attributes, local_twin
from vescale_parallel._errors import ParallelError
from vescale_parallel._local_rows.call import RowsFunction, is_trained, leading_rows, require_rows

_TOLERANCES: Final = {torch.float16: 5e-2, torch.bfloat16: 5e-2, torch.float64: 1e-7}
"""Of the largest element. Another order of sums rounds by far less, other rows differ by more."""
_TOLERANCE: Final = 1e-3

Tensors = dict[str, Tensor]


class _RowsResult(NamedTuple):
    """Results of some rows, and gradients of all that entered, by name."""

    results: Tensors
    gradients: Tensors


class _Call:
    """A call as one device makes it, apart from the caller's graph.

    Attributes:
        rows: the function.
        count: how many rows there are.
    """

    def __init__(self, rows: RowsFunction, given: inspect.BoundArguments) -> None:
        self.rows, self._given = rows, given
        self.count = len(leading_rows(rows, given))
        self._leaves: Tensors = {}
        self._modules: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        for name, value in given.arguments.items():
            if isinstance(value, nn.Module):
                named = value.named_parameters(remove_duplicate=False)
                own = {at: self._leaf(f"{name}.{at}", one) for at, one in named}
                self._modules[name] = local_twin(value, own)
            else:
                self._values[name] = self._leaves_of(name, value)

    def buffers(self) -> Tensors:
        """Return those of the modules among the arguments, as they are now."""
        modules = {name: self._given.arguments[name] for name in self._modules}
        return {f"{n}.{at}": t for n, one in modules.items() for at, t in one.named_buffers()}

    def put_back(self, name: str, kept: Tensor, values: Tensor) -> None:
        """Let a buffer be what it was before the call."""
        argument, _, at = name.partition(".")
        owner, _, last = at.rpartition(".")
        self._given.arguments[argument].get_submodule(owner)._buffers[last] = kept.copy_(values)

    def _leaves_of(self, name: str, value: Any) -> Any:
        paths = iter(named_tensors_within(value, name))
        return map_tensors(lambda one: self._leaf(next(paths), one), value)

    def _leaf(self, name: str, tensor: Tensor) -> Tensor:
        one = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        self._leaves[name] = one.detach().clone().requires_grad_(tensor.requires_grad)
        return self._leaves[name]

    def of(self, which: Tensor) -> _RowsResult:
        """Make the call with these rows only."""

        def chosen(one: Tensor) -> Tensor:
            return one.index_select(0, which.to(one.device)) if one.ndim else one.clone()

        bound = inspect.BoundArguments(self._given.signature, {})
        for name in self._given.arguments:
            if name in self._modules:
                bound.arguments[name] = self._modules[name]
            else:
                shared = name in self.rows.shared
                select = torch.clone if shared else chosen
                bound.arguments[name] = map_tensors(select, self._values[name])
        before: Tensors = {}
        for name in self._values:
            before |= named_tensors_within(bound.arguments[name], name)
        versions = {name: one._version for name, one in before.items()}
        said = self.rows.function(*bound.args, **bound.kwargs)
        written = [name for name, one in before.items() if one._version != versions[name]]
        if written:
            raise ParallelError(
                f"{self.rows.name}: it writes to its arguments {written}: what a rank writes there "
                "is lost where it got a copy. Return it."
            )
        for name, twin in self._modules.items():
            assigned_attributes(self._given.arguments[name], twin, self.rows.name)
        results = named_tensors_within(said, "result")
        require_rows(self.rows, results, len(which))
        return _RowsResult(
            {n: t.detach() for n, t in results.items()}, self._gradients(results, which)
        )

    def _gradients(self, results: Mapping[str, Tensor], which: Tensor) -> Tensors:
        trained = {n: t for n, t in self._leaves.items() if t.requires_grad}
        made = torch.Generator().manual_seed(0)
        total: Any = 0
        for one in results.values():
            # Of all rows, so that each row has the same in whichever part it comes.
            shape = (self.count, *one.shape[1:])
            weights = torch.randn(shape, generator=made, device="cpu")[which]
            if is_trained(one) and one.requires_grad:
                total = total + (one * weights.to(one)).sum()
        if not (trained and isinstance(total, Tensor)):
            return {n: torch.zeros_like(t) for n, t in trained.items()}
        found = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        return {
            n: torch.zeros_like(t) if one is None else one
            for (n, t), one in zip(trained.items(), found, strict=True)
        }


def require_independent(rows: RowsFunction, given: inspect.BoundArguments) -> None:
    """Compare a call with its parts. Collective where distributed tensors are given.

    Raises:
        ParallelError: alike on every rank: what differs, and from which row on.
    """
    call = _Call(rows, given)
    if call.count < 2:
        raise ParallelError(f"{rows.name}: {call.count} rows have no parts; prove it with more.")
    everything = torch.arange(call.count, device="cpu")
    with torch.enable_grad():
        buffers, state = call.buffers(), torch.get_rng_state()
        values = {n: t.clone() for n, t in buffers.items()}
        wanted = call.of(everything)
        _require_quiet(call, buffers, values, state)
        for cuts in _cuts(call.count):
            parts = [everything[a:b] for a, b in itertools.pairwise(cuts)]
            found = _joined([call.of(part) for part in parts])
            _require_same(rows, wanted, found, f"in parts of {[len(one) for one in parts]} rows")
        turned = call.of(everything.flip(0))
        back = {n: t.flip(0) for n, t in turned.results.items()}
        _require_same(rows, wanted, turned._replace(results=back), "in the reverse order")


def _cuts(count: int) -> list[list[int]]:
    # Also a part without rows, as a rank may have.
    return [[0, count // 2, count // 2, count], [0, 1, count]]


def _joined(parts: Sequence[_RowsResult]) -> _RowsResult:
    results = {n: torch.cat([one.results[n] for one in parts]) for n in parts[0].results}
    gradients = {n: sum(one.gradients[n] for one in parts) for n in parts[0].gradients}
    return _RowsResult(results, gradients)  # type: ignore[arg-type]


def _require_quiet(
    call: _Call, buffers: Mapping[str, Tensor], values: Mapping[str, Tensor], state: Tensor
) -> None:
    """Refuse what one call leaves behind: each rank would leave what its own rows give."""
    now = call.buffers()
    changed = [n for n, t in buffers.items() if now[n] is not t or not torch.equal(t, values[n])]
    for name in changed:
        call.put_back(name, buffers[name], values[name])
    if changed:
        raise ParallelError(f"{call.rows.name}: it writes to {changed}, of the rows of all ranks.")
    if not torch.equal(state, torch.get_rng_state()):
        raise ParallelError(
            f"{call.rows.name}: it draws random numbers, which would be others for rows of a part. "
            "Drop out before or behind it."
        )


def _require_same(rows: RowsFunction, wanted: _RowsResult, found: _RowsResult, how: str) -> None:
    for name, one in wanted.results.items():
        other = found.results.get(name)
        if other is None or other.shape != one.shape or other.dtype != one.dtype:
            said = "not there" if other is None else f"{tuple(other.shape)} {other.dtype}"
            raise ParallelError(
                f"{rows.name}: rows are not independent. {name} is {tuple(one.shape)} {one.dtype} "
                f"of all rows, and {said} {how}."
            )
        apart = _apart(one, other)
        if apart.any():
            first = int(apart.reshape(len(apart), -1).any(1).nonzero()[0])
            raise ParallelError(
                f"{rows.name}: rows are not independent. {name} is another {how}, from row {first} "
                f"on, by up to {_distance(one, other):.3g}. Leave it gathered, or move what looks "
                "at several rows outside."
            )
    for name, gradient in wanted.gradients.items():
        if _apart(gradient, found.gradients[name]).any():
            raise ParallelError(
                f"{rows.name}: rows are not independent. Results agree, and the gradient of "
                f"'{name}' is another {how}, by up to "
                f"{_distance(gradient, found.gradients[name]):.3g}."
            )


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Where the two are not the same, but for rounding."""
    if not is_trained(one):
        return one != other
    finite = one[one.isfinite()]
    most = finite.abs().max() if finite.numel() else 0.0
    close = (one - other).abs() <= _TOLERANCES.get(one.dtype, _TOLERANCE) * most
    return ~(close | (one == other) | (one.isnan() & other.isnan()))


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())
