"""Dropout of a piece of a tensor on CUDA: the fused kernel of ATen, whose map is its own.

`F.dropout` on CUDA is `native_dropout`. Its kernel loads V neighbours at once, and from the same
blocks come V neighbouring numbers; V depends on the dtype and on the size of the whole tensor.
Source: ATen/native/cuda/Dropout.cu. CUDA.md has the map in words.
"""

import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from threading import RLock
from typing import Any

import numpy as np
import torch

from vescale_rng import _cuda_generator
from vescale_rng._cuda_check import PLACE, check_capture, compare_kernel, same_bits
from vescale_rng._cuda_device import Drawer, cuda_device, threads_of
from vescale_rng._cuda_generator import CudaPosition, GraphGenerator
from vescale_rng._cuda_map import WORDS_PER_TURN, Segment, Segments, increment
from vescale_rng._cuda_recipes import Recipe
from vescale_rng._cuda_spans import spans_of
from vescale_rng._cuda_waves import WINDOW, Waves
from vescale_rng._errors import DeviceError
from vescale_rng._kernels import have_triton
from vescale_rng._layout import Layout, whole
from vescale_rng._like import make_like
from vescale_rng._native_cuda import Place, copy_windows, source
from vescale_rng._philox import philox4x32, split64
from vescale_rng._plan import Plan, plan_for

# Elements by which the widths of the vectors are told apart: no more than any device has threads.
_LOOK = 256


@dataclass(frozen=True)
class Op:
    """What is dropped out, and where.

    Attributes:
        p: probability of an element to be zeroed.
        dtype: of the tensor.
        device: the device that draws.
        threads: those whose numbers they are.
    """

    p: float
    dtype: torch.dtype
    device: Drawer
    threads: int


@dataclass(frozen=True)
class Dropping:
    """How a tensor of some size is dropped out.

    Attributes:
        vector: neighbours that a thread takes at once; 1 is the map of other random kernels, over
            the elements in row-major order whatever their memory order.
        threads: those whose numbers they are.
        numel: elements of the whole tensor.
    """

    vector: int
    threads: int
    numel: int

    @property
    def wave(self) -> int:
        """Elements that all threads fill in one turn."""
        return self.threads * (4 if self.vector == 1 else self.vector)

    @property
    def turn(self) -> int:
        """Words that a thread passes in one turn."""
        return WORDS_PER_TURN * max(1, self.vector // 4)

    @property
    def segments(self) -> Segments:
        """One launch, for any size: this kernel is not split."""
        # The words are reserved as if there were no vectors.
        words = increment(self.numel, self.threads * 4)
        return Segments((Segment(0, self.numel, 0),), words)

    def order(self, layout: Layout) -> Layout:
        """The layout whose memory order is the one that elements are counted in."""
        return replace(layout, memory_order=None) if self.vector == 1 else layout

    def recipe(self, p: float, dtype: torch.dtype) -> tuple[str, Recipe]:
        """The map and the arithmetic of the kernel."""
        name, unroll = ("grid", 4) if self.vector == 1 else ("vectors", self.vector)
        bits: int = struct.unpack("<q", struct.pack("<d", threshold(p, dtype)))[0]
        return name, Recipe(unroll, "bernoulli", (bits, 0, 0))


def threshold(p: float, dtype: torch.dtype) -> float:
    """The fp32 number that what is kept draws a smaller number than.

    The numbers are fp32 for every dtype; for fp64 they are compared with an fp64 probability,
    which comes to the same as the next fp32 number that is not smaller.
    """
    keep = 1.0 - p
    rounded = float(np.float32(keep))
    if dtype == torch.float64 and rounded < keep:
        rounded = float(np.nextafter(np.float32(keep), np.float32(2)))
    return rounded


def scales(p: float, dtype: torch.dtype) -> tuple[float, float]:
    """What the kept elements and their gradients are multiplied by: not always the same."""
    keep = 1.0 - p
    # In the forward pass the probability is rounded first.
    forward = keep if dtype == torch.float64 else float(np.float32(keep))
    return 1.0 / forward, 1.0 / keep


class DropoutRoutes:
    """What has been found out about dropout on one device, for each dtype."""

    def __init__(self, device: Drawer) -> None:
        self._device = device
        self._lock = RLock()
        self._found: dict[torch.dtype, tuple[int, str]] = {}

    def route(self, dtype: torch.dtype) -> tuple[int, str]:
        """The widest vector of a dtype, and why there is no kernel (or nothing).

        Raises:
            DeviceError: torch drops out by another map than this version knows, or a CUDA graph is
                being captured and the question has not been asked before.
        """
        with self._lock:
            if dtype not in self._found:
                check_capture(self._device.device, f"dropout for {dtype}")
                self._found[dtype] = self._ask(dtype)
            return self._found[dtype]

    def _ask(self, dtype: torch.dtype) -> tuple[int, str]:
        widest = self._widest(dtype)
        why = "" if have_triton() else "triton is not installed"
        vector = widest
        while vector:
            expected = self._check_map(dtype, vector, widest)
            why = why or self._differs(dtype, vector, expected)
            vector //= 2
        if why and have_triton():
            warnings.warn(
                f"vescale-rng: dropout for {dtype} on {self._device.device}: {why}; torch draws "
                "its pieces itself, which is right but slower",
                stacklevel=2,
            )
        return widest, why

    def _widest(self, dtype: torch.dtype) -> int:
        """The vector of a size that every width divides, found by looking at what is kept."""
        given = torch.ones(_LOOK, dtype=dtype, device=self._device.device)
        found = self._device.dropout(given, 0.5, PLACE).cpu().numpy()
        for vector in (16, 8, 4, 2, 1):
            if np.array_equal(found, _kept(vector)):
                return vector
        raise self._unknown(dtype)

    def _check_map(self, dtype: torch.dtype, vector: int, widest: int) -> torch.Tensor:
        """What torch keeps of several waves, after a look at how it comes about."""
        device = self._device
        # A size of exactly this width.
        numel = device.threads * (4 if vector == 1 else vector) * 2 + 3 * vector
        drop = Dropping(vector, device.threads, numel)
        given = torch.ones(numel, dtype=dtype, device=device.device)
        if vector_of(numel, widest) != vector:
            raise self._unknown(dtype)
        expected = device.dropout(given, 0.3, PLACE)
        waves = _waves(drop, Op(0.3, dtype, device, device.threads), PLACE, widest)
        ranges = ((drop.wave - 5, drop.wave + 300), (2 * drop.wave, numel), (0, 700))
        if not all(same_bits(waves.take(a, b), expected[a:b]) for a, b in ranges):
            raise self._unknown(dtype)
        return expected

    def _differs(self, dtype: torch.dtype, vector: int, expected: torch.Tensor) -> str:
        drop = Dropping(vector, self._device.threads, expected.numel())
        op = Op(0.3, dtype, self._device, self._device.threads)

        def run() -> torch.Tensor:
            found = torch.zeros_like(expected)
            _by_kernel(whole(found.shape), drop, op, PLACE, found)
            return found

        return compare_kernel(run, expected)

    def _unknown(self, dtype: torch.dtype) -> DeviceError:
        return DeviceError(
            f"dropout for {dtype}: torch {torch.__version__} on {self._device.device} with "
            f"{self._device.threads} threads does not draw it by the map that this version of "
            "vescale-rng knows, so a piece of it cannot be drawn alone"
        )


@cache
def dropout_routes_of(index: int) -> DropoutRoutes:
    """What has been found out on the CUDA device of that index."""
    return DropoutRoutes(cuda_device(index))


def vector_of(numel: int, widest: int) -> int:
    """The vector of a tensor: the widest, halved until it divides the number of elements."""
    vector = widest
    while numel % vector:
        vector //= 2
    return vector


def dropout(
    local: torch.Tensor,
    p: float,
    layout: Layout,
    generator: torch.Generator | GraphGenerator | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of `native_dropout(x, p, True)`: the result and the mask.

    Args:
        local: this rank's elements, on CUDA.
        p: probability of an element to be zeroed.
        layout: which they are, of a tensor with elements.
        generator: of the same device; None is torch's default, the only one that torch's own
            dropout knows.
    """
    if p == 1:
        # On CUDA torch draws nothing here.
        result, mask = torch.native_dropout(local, p, True)
        return result, mask
    index = local.device.index
    mask, held = make_like(local, layout, torch.bool)
    plan = plan_for(held, mask)
    op = Op(p, local.dtype, cuda_device(index), threads_of(local.device))
    routes = dropout_routes_of(index)
    if isinstance(generator, GraphGenerator):
        generator.offset.add_(fill(mask, op, plan, generator, routes))
    else:
        generator = generator or _cuda_generator.default_of(local.device)
        place = _cuda_generator.read(generator)
        words = fill(mask, op, plan, place, routes)
        _cuda_generator.write(generator, place.after(words))
    return scaled(local, mask, p), mask


def words_of(numel: int, threads: int) -> int:
    """How far a dropout of ``numel`` elements moves a CUDA generator, in words."""
    return Dropping(1, threads, numel).segments.words if numel else 0


def fill(mask: torch.Tensor, op: "Op", plan: Plan, place: Place, routes: DropoutRoutes) -> int:
    """Draw what is kept of a rank's part; how far the whole op moves a generator."""
    widest, why = routes.route(op.dtype)
    drop = Dropping(vector_of(plan.numel, widest), op.threads, plan.numel)
    if not why:
        _by_kernel(plan.layout, drop, op, place, mask)
    elif isinstance(place, GraphGenerator) or op.threads != op.device.threads:
        raise DeviceError(
            f"dropout for {op.dtype} on {op.device.device}: {why}, and without it torch can "
            "neither draw from a GraphGenerator nor the numbers of a GPU with other threads"
        )
    else:
        copy_windows(drop.order(plan.layout), drop.wave, _waves(drop, op, place, widest), mask)
    return drop.segments.words


def scaled(local: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """What `native_dropout` makes of its input and mask, with its derivative."""
    result: torch.Tensor = _Scaled.apply(local, mask, p)  # type: ignore[no-untyped-call]
    return result


class _Scaled(torch.autograd.Function):
    """Forward and backward both multiply by the mask, and by scales that may round apart."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        forward, ctx.scale = scales(p, local.dtype)
        result: torch.Tensor = torch.ops.aten.native_dropout_backward(local, mask, forward)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        # An op of torch with a derivative of its own: so there is a second one here as well.
        return torch.ops.aten.native_dropout_backward(gradients[0], mask, ctx.scale), None, None


def _by_kernel(layout: Layout, drop: Dropping, op: Op, place: Place, mask: torch.Tensor) -> None:
    from vescale_rng._kernels._launch import Job, launch

    name, recipe = drop.recipe(op.p, op.dtype)
    job = Job(recipe, source(place), drop.threads, map=name)
    for span in spans_of(layout, drop.order(layout).memory_order):
        launch(job, mask, span, drop.segments.parts[0])


def _waves(drop: Dropping, op: Op, place: CudaPosition, widest: int) -> Waves:
    device = op.device.device

    def draw(out: torch.Tensor, words: int) -> None:
        # As long that torch takes the same vector: a multiple of it, and of nothing wider.
        size = next(n for n in _lengths(out.numel()) if vector_of(n, widest) == drop.vector)
        given = torch.ones(size, dtype=op.dtype, device=device)
        out.copy_(op.device.dropout(given, op.p, place.after(words))[: out.numel()])

    room = Waves.room(max(WINDOW, 4 * drop.wave), drop.wave, drop.numel)
    scratch = torch.empty(room, dtype=torch.bool, device=device)
    return Waves(draw, drop.segments, drop.wave, scratch, drop.turn)


def _lengths(least: int) -> Iterator[int]:
    return iter(range(least, least + 32))


def _kept(vector: int) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """What is kept of the first elements with probability one half, by vectors of that width."""
    index = np.arange(_LOOK, dtype=np.int64)
    # So few elements are one for each thread: no turns, no lanes far apart.
    thread, inside = (index, index * 0) if vector == 1 else (index // vector, index % vector)
    low, high = split64(PLACE.offset // 4 + inside // 4)
    key = (PLACE.seed & 0xFFFFFFFF, PLACE.seed >> 32)
    words = np.stack(philox4x32((low, high, thread, 0), key))
    word = np.take_along_axis(words, (inside % 4)[None], 0)[0]
    uniform = word.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    return np.asarray(uniform < np.float32(0.5))
