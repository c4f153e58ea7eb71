"""One trial: a form of an entry on DTensors of some layouts, and the same on one device."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from _entries import Sample
from _forms import Form, blank, call, detached
from _places import Scenario, distributed
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

WRONG, RAISED = "wrong", "raised"


@dataclass
class Reference:
    """What one device answers.

    Attributes:
        result: with detached tensors.
        tensors: the operands after the call.
        starts: cotangents of the differentiable results, by their place among the results.
        gradients: of the operands; None for those that have none.
        state: of the generator after the call.
        draws: whether the call drew random numbers.
    """

    result: Any
    tensors: list[Tensor]
    starts: dict[int, Tensor]
    gradients: list[Tensor | None]
    state: Tensor
    draws: bool


@dataclass(frozen=True)
class Trial:
    """What to try: `sample` in `form`, with the layouts of `scenario`.

    Attributes:
        label: says all this in words.
        valued: whether values count, or only shapes: of what is not initialised.
    """

    sample: Sample
    form: Form
    scenario: Scenario
    reference: Reference
    label: str
    seed: int
    valued: bool = True


class WrongError(AssertionError):
    """Another answer than that of one device."""


def reference(sample: Sample, form: Form, seed: int) -> Reference | None:
    """One device's answer; None where it raises."""
    tensors = detached(form, sample.tensors(), grad=True)
    with quiet():
        try:
            out = None
            if form.out:
                torch.manual_seed(seed)
                plain = replace(form, out=False)
                expected = call(plain, sample, detached(form, sample.tensors(), grad=False))
                out = blank(expected)
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            result = call(form, sample, tensors, out)
        except Exception:  # whatever it says: this is no call that torch takes
            return None
        if form.out:
            result = out if result is None else result  # unbind_copy returns nothing then
            if not _agrees(result, expected):
                return None  # torch itself is wrong: fft.ihfft2 writes zeros
        state = torch.get_rng_state()
        starts, gradients = _differentiated(result, tensors, seed)
    kept = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, result)
    draws = not torch.equal(before, state)
    return Reference(kept, [t.detach() for t in tensors], starts, gradients, state, draws)


def _agrees(result: Any, expected: Any) -> bool:
    if result is None:
        return True  # split_copy and others return nothing where they are given where to write
    pairs = zip(tree_leaves(result), tree_leaves(expected), strict=True)
    try:
        for one, other in pairs:
            torch.testing.assert_close(one, other, equal_nan=True)
    except AssertionError:
        return False
    return True


def _differentiated(
    result: Any, tensors: list[Tensor], seed: int
) -> tuple[dict[int, Tensor], list[Tensor | None]]:
    """Cotangents, and the gradients that they lead to; none where torch has no derivative."""
    generator = torch.Generator().manual_seed(seed)
    results = {i: r for i, r in enumerate(tree_leaves(result)) if _differentiable(r)}
    leaves = [t for t in tensors if t.requires_grad]
    if not results or not leaves:
        return {}, [None] * len(tensors)
    starts = {i: _cotangent(r, generator) for i, r in results.items()}
    try:
        found = torch.autograd.grad(
            list(results.values()), leaves, list(starts.values()), allow_unused=True
        )
    except (RuntimeError, NotImplementedError):
        return {}, [None] * len(tensors)
    feed = iter(found)
    return starts, [next(feed) if t.requires_grad else None for t in tensors]


def _differentiable(result: Any) -> bool:
    return isinstance(result, Tensor) and result.requires_grad and result.layout is torch.strided


def _cotangent(result: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(-4, 5, result.shape, generator=generator) / 4
    return drawn.to(result.dtype)


def run(trial: Trial, library: ModuleType, mesh: Any) -> None:
    """One rank's part of a trial.

    Raises:
        WrongError: what came out is not what one device gives.
    """
    sample, form, wanted = trial.sample, trial.form, trial.reference
    sources = detached(form, sample.tensors(), grad=True)
    tensors = [
        _placed(source, library, mesh, p, trial.scenario.seed + i)
        for i, (source, p) in enumerate(zip(sources, trial.scenario.placements, strict=True))
    ]
    out = _out(trial, library, mesh) if form.out else None
    torch.manual_seed(trial.seed)
    result = call(form, sample, tensors, out)
    state = torch.get_rng_state()
    if form.out:
        result = out if result is None else result
        _same_objects(result, out)
    values = tree_map(lambda x: full_value(x) if isinstance(x, Tensor) else x, result)
    _compare(values, trial)
    if not torch.equal(state, wanted.state):
        raise WrongError("the generator is not where one device leaves it")
    for index, (mine, one) in enumerate(zip(tensors, wanted.tensors, strict=True)):
        if not form.writes:  # of those the result is what was written
            _same(full_value(mine).detach(), one, f"operand {index} after the call")
    _gradients(values, tensors, trial)


def _placed(
    source: Tensor, library: ModuleType, mesh: Any, placements: tuple[str, ...], seed: int
) -> Tensor:
    if source.layout is not torch.strided or source.is_quantized:
        return source  # a sparse operand stays plain, which counts as replicated
    made = distributed(library, source, mesh, placements, seed)
    return made.requires_grad_() if source.requires_grad else made


def _out(trial: Trial, library: ModuleType, mesh: Any) -> Any:
    """What to write into: in the layout of the first operand, as far as its dims allow."""
    axes = trial.scenario.placements[0] if trial.scenario.placements else ("R",) * mesh.ndim

    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.layout is not torch.strided:
            return torch.zeros_like(x)
        fitting = tuple(p if p[0] == "S" and int(p[1:]) < x.ndim else "R" for p in axes)
        return distributed(library, torch.zeros_like(x), mesh, fitting, 0)

    return tree_map(one, trial.reference.result)


def _same_objects(result: Any, out: Any) -> None:
    pairs = zip(tree_leaves(result), tree_leaves(out), strict=True)
    if not all(a is b for a, b in pairs):
        raise WrongError("out= gave back another object than it was given")


def full_value(tensor: Tensor) -> Tensor:
    """The global value of a DTensor of either library, as a plain tensor; differentiable."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()  # type: ignore[no-any-return]


def _compare(found: Any, trial: Trial) -> None:
    mine, wanted = tree_leaves(found), tree_leaves(trial.reference.result)
    if len(mine) != len(wanted):
        raise WrongError(f"{len(mine)} results, not {len(wanted)}")
    # With `out=`, torch has types of its own: `torch.return_types.svd_out`.
    kinds = [type(x).__name__.removesuffix("_out") for x in (found, trial.reference.result)]
    if kinds[0] != kinds[1]:
        raise WrongError(f"a {kinds[0]}, not a {kinds[1]}")
    for index, (one, other) in enumerate(zip(mine, wanted, strict=True)):
        if isinstance(other, Tensor):
            _same_tensor(one, other, index, trial)
        elif isinstance(other, float):
            _same(torch.tensor(one), torch.tensor(other), f"result {index}")
        elif one != other:
            raise WrongError(f"result {index}: {one!r}, not {other!r}")


def _same_tensor(one: Any, other: Tensor, index: int, trial: Trial) -> None:
    if not isinstance(one, Tensor):
        raise WrongError(f"result {index}: {one!r}, not a tensor")
    if index in trial.reference.starts and not one.requires_grad:
        raise WrongError(f"result {index} requires no gradient")
    if not trial.valued:
        one, other = torch.zeros_like(one), torch.zeros_like(other)
    reduces = any(t.numel() > other.numel() for t in trial.reference.tensors)
    summed = _largest(*trial.reference.tensors) if reduces else 0.0
    _same(one.detach(), other, f"result {index}", trial.reference.draws, summed)


def _gradients(values: Any, tensors: list[Tensor], trial: Trial) -> None:
    wanted = trial.reference
    if not wanted.starts:
        return
    results = tree_leaves(values)
    scale = _largest(*(results[i].detach() for i in wanted.starts), *wanted.starts.values())
    torch.autograd.backward([results[i] for i in wanted.starts], list(wanted.starts.values()))
    for index, (mine, one) in enumerate(zip(tensors, wanted.gradients, strict=True)):
        if not mine.requires_grad:
            continue
        found = mine.grad
        # Nothing stands for zeros.
        zeros = torch.zeros(mine.shape, dtype=mine.dtype)
        _same(
            zeros if found is None else full_value(found).detach(),
            zeros if one is None else one,
            f"gradient of operand {index}",
            summed=scale,
        )


def _same(
    found: Tensor, wanted: Tensor, what: str, exact: bool = False, summed: float = 0.0
) -> None:
    """Equal up to the order of sums of numbers as large as `summed`, in units of the last place."""
    if found.layout is not wanted.layout:
        raise WrongError(f"{what}: {found.layout}, not {wanted.layout}")
    tolerance: dict[str, float] = {"rtol": 0, "atol": 0}
    if not exact and wanted.dtype in _ROUNDING:
        unit = _ROUNDING[wanted.dtype]
        tolerance = {"rtol": 64 * unit, "atol": 32 * unit * max(summed, _largest(wanted))}
    try:
        torch.testing.assert_close(found, wanted, equal_nan=True, **tolerance)
    except AssertionError as problem:
        raise WrongError(f"{what}: {' '.join(str(problem).split())[:300]}") from None


def _largest(*tensors: Tensor) -> float:
    """The largest finite absolute value."""
    found = 0.0
    for tensor in tensors:
        if tensor.numel() and tensor.layout is torch.strided and tensor.dtype in _ROUNDING:
            sizes = tensor.abs()
            found = max(found, float(torch.where(torch.isfinite(sizes), sizes, 0).max()))
    return found


_ROUNDING = {
    dtype: torch.finfo(dtype).eps
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}
_ROUNDING |= {torch.complex64: 2.0**-23, torch.complex128: 2.0**-52}


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warnings, which are about the samples, and notes of fallbacks."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)
