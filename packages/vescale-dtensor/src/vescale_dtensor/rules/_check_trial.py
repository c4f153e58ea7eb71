"""Runs one call on one device and on a mesh, and compares the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm.nested import tensors_within

from vescale_dtensor._autograd.gradient_reducer import gradient_total
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._layout.spec import order_of
from vescale_dtensor._planning.op_call import substitute
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor.rules._check_layouts import Combination, spread


@dataclass(frozen=True)
class Sample:
    """The arguments of one call on one device.

    Attributes:
        args, kwargs: as `func` takes them. Tensors may be in lists and tuples. If some require
            grad, the gradients of those are compared; else of all that can have one.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(given: Any) -> Sample:
        """A sample from what users may write: a `Sample`, a tuple of arguments, or one argument."""
        if isinstance(given, Sample):
            return given
        return Sample(given if isinstance(given, tuple) else (given,))

    @property
    def operands(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return tensors_within((list(self.args), dict(self.kwargs)))

    def call(self, func: Callable[..., Any], operands: Sequence[Tensor]) -> Any:
        """Call `func` with these arguments, and other tensors in place of the operands."""
        feed = iter(operands)
        args = substitute(list(self.args), feed)
        return func(*args, **{name: substitute(v, feed) for name, v in self.kwargs.items()})


@dataclass(frozen=True)
class ExpectedResult:
    """What one device gives for a sample.

    Attributes:
        results: what the call returned, flat.
        operands: the operands after the call, which may have written to them.
        written: whether it did.
        cotangents: those with which backward starts, per result; empty without gradients.
        gradients: per operand; empty without gradients.
    """

    results: list[Any]
    operands: list[Tensor]
    written: bool
    cotangents: list[Tensor | None]
    gradients: list[Tensor | None]


@dataclass(frozen=True)
class Mode:
    """One code path on which a layout is run.

    Attributes:
        name: for messages.
        gradients: whether autograd records.
        leaves: whether the operands are leaves; else they are results of an op.
    """

    name: str
    gradients: bool
    leaves: bool = True


class Difference(Exception):
    """A call on a mesh differs from one device.

    Attributes:
        what: the output, gradient or operand that differs.
        words: how it differs, and by how much.
    """

    def __init__(self, what: str, words: str) -> None:
        super().__init__(f"{what}: {words}")
        self.what = what
        self.words = words


def flat(result: Any) -> list[Any]:
    """The items of nested lists, tuples and dicts, as one list."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, list | tuple):
        return [leaf for item in result for leaf in flat(item)]
    return [result]


def wants_gradient(sample: Sample) -> list[bool]:
    """For each operand, whether its gradient is compared."""
    operands = sample.operands
    asked = [x.requires_grad for x in operands]
    return asked if any(asked) else [x.is_floating_point() or x.is_complex() for x in operands]


def expected_of(
    func: Callable[..., Any], sample: Sample, gradients: bool, seed: int
) -> ExpectedResult:
    """Run a sample on one device.

    Args:
        func: the function.
        sample: its arguments; they are not changed.
        gradients: whether to compute gradients too.
        seed: of torch's random numbers and of the cotangents.
    """
    copies = [x.detach().clone() for x in sample.operands]
    versions = [x._version for x in copies]
    _seed(seed)
    with torch.no_grad():
        results = flat(sample.call(func, copies))
    written = any(x._version != version for x, version in zip(copies, versions, strict=True))
    if not gradients:
        return ExpectedResult(results, copies, written, [], [])
    wants = wants_gradient(sample)
    leaves = [x.detach().clone().requires_grad_(w) for x, w in _zip(sample.operands, wants)]
    # The same random numbers as in the first run. `x * 1`, since an op may not write to a leaf.
    _seed(seed)
    recorded = flat(sample.call(func, [x * 1 if w else x for x, w in _zip(leaves, wants)]))
    generator = torch.Generator().manual_seed(seed)
    cotangents = [_cotangent(result, generator) for result in recorded]
    _backward(recorded, cotangents)
    return ExpectedResult(results, copies, written, cotangents, [x.grad for x in leaves])


def _seed(seed: int) -> None:
    """`torch.manual_seed` without its record of the caller, which costs more than the op."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def _cotangent(result: Any, generator: torch.Generator) -> Tensor | None:
    """A random cotangent of small integers, whose sums are exact; None if the result has none."""
    if not isinstance(result, Tensor) or not result.requires_grad:
        return None
    drawn = torch.randint(-4, 5, result.shape, generator=generator, device="cpu")
    return drawn.to(result.dtype).to(result.device)


def _backward(results: Sequence[Any], cotangents: Sequence[Tensor | None]) -> None:
    pairs = [(r, c) for r, c in _zip(results, cotangents) if c is not None]
    if pairs:
        torch.autograd.backward([r for r, _ in pairs], [c for _, c in pairs])


def run_on_mesh(
    func: Callable[..., Any],
    sample: Sample,
    expected: ExpectedResult,
    mesh: DeviceMesh,
    combination: Combination,
    mode: Mode,
    seed: int,
    tolerance: Mapping[str, Any],
) -> None:
    """Run a sample on a mesh, on this rank, and compare everything. Collective.

    Args:
        func: the function.
        sample: its arguments.
        expected: what one device gives.
        mesh: the mesh.
        combination: the layout: per operand, a placement per mesh axis.
        mode: the code path.
        seed: of torch's random numbers and of partial values.
        tolerance: `rtol` and `atol`.

    Raises:
        Difference: the first thing that differs.
    """
    # Own generator, in the same state on every rank: see `spread`.
    generator = torch.Generator().manual_seed(seed)
    wants = wants_gradient(sample)
    leaves: list[DTensor] = []
    for x, placements, want in zip(sample.operands, combination, wants, strict=True):
        leaves.append(spread(x, mesh, placements, generator))
        leaves[-1].requires_grad_(want and mode.gradients)
    used: list[Any] = [x if mode.leaves or not x.requires_grad else x * 1 for x in leaves]
    versions = [x._local_tensor._version for x in used]
    before = [x._local_tensor.detach().clone() for x in used]
    _seed(seed)
    with torch.set_grad_enabled(mode.gradients):
        results = flat(sample.call(func, used))
    _compare_results(results, expected, mode, tolerance)
    for index, x in enumerate(used):
        what = f"operand {index} after the call"
        if expected.written:
            _compare(what, x, expected.operands[index], tolerance)
        # What should not have been written to is compared with itself, without communication: a
        # kernel may have written on some ranks only, and those would wait for the others.
        elif x._local_tensor._version != versions[index]:
            at = list(x._spec.layout.coordinate)
            _compare(f"{what}, on coordinate {at}", x._local_tensor, before[index], tolerance)
    if mode.gradients and expected.cotangents:
        _backward(results, expected.cotangents)
        _compare_gradients(leaves, wants, expected, tolerance)


def _compare_results(
    results: list[Any], expected: ExpectedResult, mode: Mode, tolerance: Mapping[str, Any]
) -> None:
    """Compare results with one device's: number, kind, metadata, `requires_grad` and values."""
    if len(results) != len(expected.results):
        raise Difference("results", f"{len(results)}, not {len(expected.results)}")
    for index, (result, one) in enumerate(_zip(results, expected.results)):
        what = f"output {index}"
        if not isinstance(one, Tensor):
            # `result != result`: a NaN.
            if type(result) is not type(one) or not (result == one or result != result):
                raise Difference(what, f"{result!r}, not {one!r}")
            continue
        compare_metadata(what, result, one)
        if mode.gradients and expected.cotangents:
            wanted = expected.cotangents[index] is not None
            if result.requires_grad != wanted:
                raise Difference(what, f"requires_grad is {result.requires_grad}, not {wanted}")
        _compare(what, result, one, tolerance)


def compare_metadata(what: str, result: Any, one: Tensor, *, strides: bool = True) -> None:
    """Compare what a result on a mesh says of itself with the result of one device.

    Raises:
        Difference: in type, shape, dtype, the local shape that its layout promises, or strides.
    """
    if not isinstance(result, DTensor):
        raise Difference(what, f"a {type(result).__name__}, not a DTensor")
    if result.shape != one.shape:
        raise Difference(what, f"global shape {list(result.shape)}, not {list(one.shape)}")
    if result.dtype != one.dtype:
        raise Difference(what, f"dtype {result.dtype}, not {one.dtype}")
    layout = result._spec.layout
    held = local_shape(layout, tuple(result.shape))
    local = tuple(result._local_tensor.shape)
    if held != local:
        raise Difference(
            what,
            f"the local tensor is {list(local)} on coordinate {list(layout.coordinate)}, but "
            f"{list(layout.placements)} of {list(result.shape)} gives it {list(held)}: the rule "
            "names the dims of its output wrongly, or its local kernel returns another shape",
        )
    # Strides with gaps, or of expanded dims, are no memory order: nothing is promised of those.
    real = [dim for dim, extent in enumerate(one.shape) if extent > 1]
    alike = all(result.stride(dim) == one.stride(dim) for dim in real)
    if strides and not alike and one.numel() and _is_dense(one):
        raise Difference(
            what, f"strides {result.stride()}, not {one.stride()}: see `output_orders` of Strategy"
        )


def _is_dense(one: Tensor) -> bool:
    """Whether a tensor has neither gaps nor overlaps in memory, so that strides are an order."""
    order = order_of(tuple(one.shape), one.stride())
    step = 1
    for dim in reversed(order if order is not None else range(one.ndim)):
        if one.shape[dim] > 1 and one.stride(dim) != step:
            return False
        step *= one.shape[dim]
    return True


def _compare_gradients(
    leaves: Sequence[DTensor],
    wants: Sequence[bool],
    expected: ExpectedResult,
    tolerance: Mapping[str, Any],
) -> None:
    """Compare the complete gradients of all operands that should have one. Collective."""
    for index, (leaf, want, one) in enumerate(zip(leaves, wants, expected.gradients, strict=True)):
        if not want:
            continue
        what = f"gradient of operand {index}"
        found = gradient_total(leaf)
        if one is None or found is None:
            # No gradient is as good as zeros: which of the two torch gives depends on what its
            # backward formulas leave out.
            other = one if found is None else found.full_tensor()
            if other is not None and bool(other.any()):
                raise Difference(what, f"{'none' if found is None else 'one'}, not {one}")
            continue
        _compare(what, found, one, tolerance)


def _compare(what: str, found: Any, one: Tensor, tolerance: Mapping[str, Any]) -> None:
    """Compare a global value. Collective.

    Raises:
        Difference: it is not close to one device's.
    """
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    try:
        torch.testing.assert_close(whole.detach(), one.detach(), equal_nan=True, **tolerance)
    except AssertionError as problem:
        raise Difference(what, str(problem)) from None


def _zip(first: Sequence[Any], second: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(first, second, strict=True)
