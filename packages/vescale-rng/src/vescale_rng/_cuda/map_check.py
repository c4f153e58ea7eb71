"""Compares the map of each kind of op with torch, before it is first drawn by shards.

The installed torch answers two questions on the device itself, once for each distribution and
dtype. Does ATen draw by the map that this package knows? If not, no shard can be drawn: an error.
Does the kernel give ATen's bits? If not, ATen draws the shards itself, and there is a warning. Both
are asked with generators of their own, so the caller's is not touched.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import RLock

import torch

from vescale_rng._cuda.device import Drawer, cuda_device
from vescale_rng._cuda.generator_state import CudaPosition
from vescale_rng._cuda.kernels import have_triton
from vescale_rng._cuda.recipes import Recipe, recipe_of
from vescale_rng._cuda.spans import spans_of
from vescale_rng._cuda.thread_map import segments_of
from vescale_rng._cuda.waves import Waves
from vescale_rng._distributions import (
    Bernoulli,
    Cauchy,
    Distribution,
    Exponential,
    Geometric,
    LogNormal,
    Normal,
    Uniform,
)
from vescale_rng._errors import DeviceError, DistributionError
from vescale_rng._layout.layout import whole

# Both halves of the seed are used, and the counter carries into its upper half on the way.
PLACE = CudaPosition(0x9E3779B97F4A7C15, 4 * (2**32 - 1))
# Parameters that leave no rounding untried, beside those that were asked for.
_PROBES = {
    Uniform: Uniform(-0.3, 1.7),
    Normal: Normal(0.1, 0.7),
    LogNormal: LogNormal(0.1, 0.7),
    Bernoulli: Bernoulli(0.3),
    Exponential: Exponential(1.3),
    Geometric: Geometric(0.3),
    Cauchy: Cauchy(0.1, 0.7),
}


@dataclass(frozen=True)
class Route:
    """How an op is drawn on a device.

    Attributes:
        recipe: the words it takes.
        kernel: whether the kernel has been found to give torch's bits.
        why: why not, in words, otherwise.
    """

    recipe: Recipe
    kernel: bool
    why: str = ""


class Routes:
    """The routes found so far on one device."""

    def __init__(self, device: Drawer) -> None:
        self._device = device
        # Reentrant: `route` asks `accept`. Two threads that both compared would compile the kernel
        # twice.
        self._lock = RLock()
        self._accepted: dict[tuple[Distribution, torch.dtype], Recipe] = {}
        self._kernels: dict[tuple[object, ...], str] = {}

    def route(self, distribution: Distribution, dtype: torch.dtype) -> Route:
        """Tell how to draw a distribution into a tensor of that dtype.

        Raises:
            DistributionError: torch refuses it, or does not draw it element by element.
            DeviceError: torch draws it by another map than this version knows, or a CUDA graph is
                being captured and the question has not been asked before.
        """
        with self._lock:
            recipe = self.accept(distribution, dtype)
            # The kind and the words, not the parameters: those only pass through.
            key = (type(distribution), dtype, recipe.unroll, recipe.kind)
            why = self._kernels.get(key)
            if why is None:
                check_capture(self._device.device, f"{distribution} for {dtype}")
                why = self._kernels[key] = self._compare(distribution, dtype, recipe)
        return Route(recipe, not why, why)

    def accept(self, distribution: Distribution, dtype: torch.dtype) -> Recipe:
        """Tell how torch draws a distribution, after it has not refused it.

        Raises:
            DistributionError: torch refuses it: on every rank, as all that it looks at is global.
            DeviceError: a CUDA graph is being captured, and it has not been asked before.
        """
        with self._lock:
            known = self._accepted.get((distribution, dtype))
            return self._ask(distribution, dtype) if known is None else known

    def _ask(self, distribution: Distribution, dtype: torch.dtype) -> Recipe:
        check_capture(self._device.device, f"{distribution} for {dtype}")
        # One element is enough: torch refuses by parameters and dtype.
        one = torch.empty(1, dtype=dtype, device=self._device.device)
        try:
            self._device.draw(distribution, one, PLACE)
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, DeviceError):
                raise
            reason = str(error).splitlines()[0]
            raise DistributionError(
                f"{distribution} cannot be drawn for {dtype}: torch says {reason!r}"
            ) from error
        # Bounded, for programs that draw with ever new parameters.
        if len(self._accepted) >= 4096:
            self._accepted.clear()
        recipe = self._accepted[distribution, dtype] = recipe_of(distribution, dtype)
        return recipe

    def _compare(self, asked: Distribution, dtype: torch.dtype, recipe: Recipe) -> str:
        """Say why the kernel is not used, or nothing."""
        # The parameters that were asked may hide a rounding (a mean of 0): others are tried too.
        probes = {asked: recipe}
        probe = _PROBES.get(type(asked), asked)
        other = recipe_of(probe, dtype)
        if (other.unroll, other.kind) == (recipe.unroll, recipe.kind):
            probes[probe] = other
        for distribution, each in probes.items():
            expected = self._check_map(distribution, dtype, each)
            if why := _why_not(each) or self._differs(each, expected):
                break
        if why and have_triton() and recipe.kind is not None:
            warnings.warn(
                f"vescale-rng: {type(asked).__name__} for {dtype} on {self._device.device}: {why}; "
                "torch draws its pieces itself, which is right but slower",
                stacklevel=2,
            )
        return why

    def _check_map(
        self, distribution: Distribution, dtype: torch.dtype, recipe: Recipe
    ) -> torch.Tensor:
        """Return what torch draws for several waves, after a look at how it draws them."""
        device = self._device
        wave = recipe.wave(device.threads)
        # More than one wave, and an end inside of a block: seams and remainders are where maps
        # differ.
        expected = torch.empty(wave + device.threads + 257, dtype=dtype, device=device.device)
        # By torch's own kernel in one call: what a single device has.
        end = device.draw(distribution, expected, PLACE)
        segments = segments_of(expected.numel(), expected.element_size(), wave)
        scratch = torch.empty_like(expected)

        def draw(out: torch.Tensor, words: int) -> None:
            device.draw(distribution, out, PLACE.after(words))

        # Drawn by waves and compared with one call: this is what shards rely on.
        waves = Waves(draw, segments, wave, scratch)
        # The seam of two waves from both sides, and the beginning by itself.
        ranges = ((wave - 5, wave + 300), (wave, expected.numel()), (0, device.threads + 7))
        same = (same_bits(waves.take(a, b), expected[a:b]) for a, b in ranges)
        if end != PLACE.offset + segments.words or not all(same):
            raise DeviceError(
                f"{distribution} for {dtype}: torch {torch.__version__} on {device.device} with "
                f"{device.threads} threads does not draw it by the map that this version of "
                "vescale-rng knows, so a piece of it cannot be drawn alone"
            )
        return expected

    def _differs(self, recipe: Recipe, expected: torch.Tensor) -> str:
        # Here, as it imports triton, which need not be there.
        from vescale_rng._cuda.kernels.launch import Job, WordSource, launch

        # Zeros, so that elements that the kernel leaves out show.
        found = torch.zeros_like(expected)
        wave = recipe.wave(self._device.threads)
        part = segments_of(found.numel(), found.element_size(), wave).parts[0]
        job = Job(recipe, WordSource(PLACE.seed, PLACE.offset), self._device.threads)

        def draw_by_kernel() -> torch.Tensor:
            for span in spans_of(whole(found.shape), None):
                launch(job, found, span, part)
            return found

        return compare_kernel(draw_by_kernel, expected)


def check_capture(device: torch.device, what: str) -> None:
    """Refuse to find out about `what` while a CUDA graph is captured.

    Raises:
        DeviceError: one is.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise DeviceError(
            f"{what} is drawn for the first time on {device} while a CUDA graph is captured: run "
            "it once before, as in any warm-up"
        )


def compare_kernel(run: Callable[[], torch.Tensor], expected: torch.Tensor) -> str:
    """Say why a kernel is not used: it fails, or its result is not the expected one; or nothing."""
    try:
        found = run()
        same = same_bits(found, expected)
    except Exception as error:  # Whatever a compiler or a driver says: torch can do without.
        return f"the Triton kernel cannot run there ({type(error).__name__}: {_line(error)})"
    return "" if same else "the Triton kernel does not give torch's bits there"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors hold the same bytes: also NaN equals itself."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _why_not(recipe: Recipe) -> str:
    if recipe.kind is None:
        return "there is no kernel for it"
    return "" if have_triton() else "triton is not installed (pip install 'vescale-rng[triton]')"


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else ""


@cache
def routes_of(index: int) -> Routes:
    """Return the routes of the CUDA device of that index."""
    return Routes(cuda_device(index))
