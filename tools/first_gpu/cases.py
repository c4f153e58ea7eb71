"""Cases: one question each, and what may be said of two tensors that should be alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

TOLERANCE: Final = 1e-5
"""How far results may be from one device's where sums are taken in another order (relative)."""

BITS: Final = "one device's bits"

NEEDS: Final = {
    "cuda": "needs CUDA",
    "kernels": "needs triton, and a GPU or its interpreter",
    "fp8": "needs triton, and a GPU of compute capability 8.9 or more",
    "triton gpu": "needs triton and CUDA",
    "compiler": "needs a C++ compiler (g++)",
    "many kernels": "needs triton and CUDA: interpreted, it takes minutes",
}
"""What a case may need, and what is said where it is not there."""


@dataclass(frozen=True)
class CaseResult:
    """What a case found.

    Attributes:
        expected: in words.
        got: in words.
        fine: whether that is as expected; None: it is a figure, neither right nor wrong.
        more: what does not fit on a line.
    """

    expected: str
    got: str
    fine: bool | None
    more: str = ""


@dataclass(frozen=True)
class Case:
    """One question.

    Attributes:
        name: unique in its section; what `--case` is given.
        ask: asks it on a device. What it raises is a finding, too.
        needs: keys of `NEEDS`.
        patience: seconds that it may take beyond what any case may before it is taken to hang.
    """

    name: str
    ask: Callable[[torch.device], CaseResult]
    needs: tuple[str, ...] = ()
    patience: float = 0.0


Pair = tuple[Any, Any]
"""What was expected, and what was there."""


def figure(got: str, expected: str = "a figure", more: str = "") -> CaseResult:
    """What is neither right nor wrong."""
    return CaseResult(expected, got, None, more)


def holds(expected: str, fine: bool, got: str = "", more: str = "") -> CaseResult:
    """A statement that is true or not."""
    return CaseResult(expected, got or ("so" if fine else "not so"), fine, more)


def same_bits(pairs: Mapping[str, Pair], expected: str = BITS) -> CaseResult:
    """All pairs have the same bytes; NaN equals itself."""
    wrong = {name: one for name, (a, b) in pairs.items() if (one := _difference(a, b))}
    return _found(expected, f"the same bits ({_counted(pairs)})", wrong)


def alike(
    pairs: Mapping[str, Pair], tolerance: float = TOLERANCE, expected: str | None = None
) -> CaseResult:
    """All pairs have the same bits, or differ by no more than the tolerance, of the largest."""
    furthest, bitwise, wrong = 0.0, True, {}
    for name, (a, b) in pairs.items():
        if not (difference := _difference(a, b)):
            continue
        bitwise, distance = False, _distance(a, b)
        furthest = max(furthest, distance)
        if not distance <= tolerance:
            wrong[name] = difference
    got = "the same bits" if bitwise else f"within {furthest:.1e}"
    expected = expected or f"within {tolerance:.0e} of one device"
    return _found(expected, f"{got} ({_counted(pairs)})", wrong)


def both(*found: CaseResult) -> CaseResult:
    """Several findings as one: as bad as the worst."""
    bad = [one for one in found if one.fine is False]
    shown = bad or found
    return CaseResult(
        "; ".join(dict.fromkeys(one.expected for one in shown)),
        "; ".join(dict.fromkeys(one.got for one in shown)),
        False if bad else (None if all(one.fine is None for one in found) else True),
        "\n".join(one.more for one in found if one.more),
    )


def _found(expected: str, got: str, wrong: Mapping[str, str]) -> CaseResult:
    if not wrong:
        return CaseResult(expected, got, True)
    lines = [f"{name}: {text}" for name, text in wrong.items()]
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return CaseResult(expected, lines[0] + more, False, "\n".join(lines))


def _counted(pairs: Sequence[object] | Mapping[str, object]) -> str:
    return f"{len(pairs)} compared"


def _difference(expected: Any, got: Any) -> str:
    """Say in what two values differ; nothing if they have the same bits."""
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        return "" if expected == got else f"{got!r} for {expected!r}"
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        return f"{got.dtype} {tuple(got.shape)} for {expected.dtype} {tuple(expected.shape)}"
    if expected.device == got.device and torch.equal(_bytes(expected), _bytes(got)):
        return ""  # on the device: most are alike, and copies to the host take their time
    a, b = (one.detach().to("cpu").reshape(-1) for one in (expected, got))
    if not a.numel():
        return ""
    unlike = _bytes(a).ne(_bytes(b)).view(a.numel(), -1).any(1)
    if a.dtype.is_floating_point or a.dtype.is_complex:
        # NaNs of other bits are NaNs.
        unlike = unlike.logical_and(a.isnan().logical_and(b.isnan()).logical_not())
    count = int(unlike.sum())
    if not count:
        return ""
    at = int(unlike.nonzero()[0])
    text = f"{count} of {a.numel()} elements, first at {at}: {b[at].item()} for {a[at].item()}"
    return f"{text}, {_distance(expected, got):.1e} at most"


def _bytes(x: Tensor) -> Tensor:
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def _distance(expected: Any, got: Any) -> float:
    """The largest difference, relative to the largest value; infinite where that says nothing."""
    if not isinstance(expected, Tensor):
        expected, got = (torch.tensor(float(one), dtype=torch.float64) for one in (expected, got))
    if expected.shape != got.shape:
        return float("inf")
    a, b = (one.detach().to("cpu").to(torch.float64) for one in (expected, got))
    if not a.numel():
        return 0.0
    largest = max(float(a.abs().max()), 1e-30)
    distance = float((a - b).abs().max()) / largest
    return distance if distance == distance else float("inf")
