"""Every Triton kernel beside its reference, on a GPU or interpreted on the CPU.

They are called by themselves, past the functions that choose between them and torch: so this file
looks into the packages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tools.first_gpu.cases import Case, CaseResult, holds, same_bits
from tools.first_gpu.paths import of_tests
from tools.first_gpu.rng_shards import FLOATS, SPLITS, distributions, parts, short, strided

KEY = 0x0C7F0AAC97C4AA2F
INTERPRETED = {("Uniform", "float32"), ("Normal", "float32"), ("Bernoulli", "bool")}
"""Kinds that are drawn by the interpreter as well, which takes seconds for each."""


def cases(device: torch.device) -> list[Case]:
    """Those of the wire formats, then those that draw: float32 of each first."""
    wires = [Case("quantise int8", _beside("quantised", "int8"), ("kernels",)),
             Case("fold", _beside("folded"), ("kernels",)),
             Case("blocks that are not finite", _beside("not_finite"), ("kernels",)),
             Case("quantise fp8", _beside("quantised", "fp8"), ("fp8",)),
             Case("wire int8, beside the host", partial(_wire, "int8"), ("triton gpu",)),
             Case("wire fp8, beside the host", partial(_wire, "fp8"), ("triton gpu",))]  # fmt: skip
    kinds = distributions()
    drops = [Case(f"native dropout, {short(dtype)}", partial(_native_dropout, dtype),
                  ("kernels" if dtype == torch.float32 else "many kernels",))
             for dtype in FLOATS]  # fmt: skip
    return [
        *wires, *_each("native", _native, kinds[:6]), *drops,
        *_each("portable", _portable, kinds), *_each("native", _native, kinds[6:]),
        Case("native probabilities", _native_probabilities, ("kernels",)),
    ]  # fmt: skip


def _each(
    policy: str, ask: Callable[..., CaseResult], kinds: Sequence[tuple[Any, torch.dtype]]
) -> list[Case]:
    """A case for each kind; interpreted, only of some."""
    found = []
    for one, dtype in kinds:
        few = (type(one).__name__, short(dtype)) in INTERPRETED
        needs = ("kernels" if few else "many kernels",)
        found.append(Case(f"{policy} {one}, {short(dtype)}", partial(ask, one, dtype), needs))
    return found


def _beside(function: str, *given: str) -> Callable[[torch.device], CaseResult]:
    """Ask what the tests of the package compare as well."""

    def ask(device: torch.device) -> CaseResult:
        compared = getattr(of_tests("comm", "vescale_comm_kernels"), function)(*given, device)
        pairs = {name: (expected, found) for name, expected, found in compared}
        return same_bits(pairs, "the bits of the torch path on the host")

    return ask


def _wire(wire: Any, device: torch.device) -> CaseResult:
    """A compressed sum by the public function: the kernels on a GPU, torch on the host."""
    from vescale_comm import Emulator

    found, values = [], of_tests("comm", "vescale_comm_kernels").values
    for where in (torch.device("cpu"), device):
        xs = [values(70_001, seed).to(where) for seed in range(3)]
        found.append(Emulator(3).all_reduce(xs, order="rank", wire=wire))
    pairs = {f"member {at}": one for at, one in enumerate(zip(*found, strict=True))}
    return same_bits(pairs, "the host's bits")


def _portable(distribution: Any, dtype: torch.dtype, device: torch.device) -> CaseResult:
    """The kernel of the portable policy beside numpy's numbers, in boxes of several kinds."""
    from vescale_rng import _portable as policy
    from vescale_rng._portable import launch
    from vescale_rng._portable.maps import map_of

    kind = map_of(distribution, dtype)
    if kind.fused is None:
        return same_bits({}, "there is no kernel for it: torch draws")
    key = torch.full((1,), KEY, device=device)
    pairs: dict[str, Any] = {}
    for split in SPLITS:
        shape = tuple(1501 if extent == -1 else extent for extent in split.shape)
        if device.type == "cpu" and torch.Size(shape).numel() > 10_000:
            shape = tuple(min(extent, 21) for extent in shape)
        for coordinate in list(split.ranks())[:3]:
            layout = split.layout(coordinate, shape)
            expected = strided(layout.local_shape, split.order, dtype, torch.device("cpu"))
            policy.fill_portable(expected, distribution, layout, KEY)
            found = strided(layout.local_shape, split.order, dtype, device)
            launch.launch_fill(found, kind, kind.fused, layout, key)
            for (at, view), (_, other) in zip(
                parts(expected, layout), parts(found, layout), strict=True
            ):
                name = f"{split.name}, rank {tuple(coordinate)}, {[one.start for one in at]}"
                pairs[name] = (view, other)
    return same_bits(pairs, "numpy's bits")


def _drawer(device: torch.device) -> Any:
    """What draws as a device does: the GPU itself, or its model of few threads in numpy."""
    if device.type == "cuda":
        from vescale_rng._cuda.device import cuda_device

        return cuda_device(device.index or 0)
    return of_tests("rng", "cuda_model").ModelDevice(512)


def _native(distribution: Any, dtype: torch.dtype, device: torch.device) -> CaseResult:
    """The kernel of the native policy, as it is compared before it is used."""
    from vescale_rng import DistributionError
    from vescale_rng._cuda.map_check import Routes
    from vescale_rng._cuda.recipes import recipe_of

    if recipe_of(distribution, dtype).kind is None:
        return holds("there is no kernel for it", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is said is found
        try:
            route = Routes(_drawer(device)).route(distribution, dtype)
        except DistributionError as error:
            return holds("torch draws it", True, f"torch refuses it: {str(error)[:80]}")
    return holds("torch's bits", route.kernel, route.why or "the same bits")


def _native_dropout(dtype: torch.dtype, device: torch.device) -> CaseResult:
    from vescale_rng._cuda.dropout_check import DropoutRoutes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        widest, why = DropoutRoutes(_drawer(device)).route(dtype)
    return holds("torch's bits", not why, why or f"the same bits, vectors of {widest}")


def _native_probabilities(device: torch.device) -> CaseResult:
    from vescale_rng._cuda.bernoulli import BernoulliRoutes

    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.float32, torch.float64, torch.bool):
            found[dtype] = BernoulliRoutes(_drawer(device)).why_not(dtype)
    bad = [f"{short(dtype)}: {why}" for dtype, why in found.items() if why]
    return holds("torch's bits", not bad, bad[0] if bad else "the same bits")
