"""`bernoulli_` with a tensor of probabilities on CUDA: a kernel of ATen with a map of its own.

One thread takes four neighbours from one block; u at most p is 1. However large the tensor is, the
generator moves by 12 words. Source: `bernoulli_tensor_cuda_kernel` in
ATen/native/cuda/DistributionTemplates.h.
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from threading import RLock

import torch

from vescale_rng._cuda import generator_state as cuda_state
from vescale_rng._cuda.device import Drawer, cuda_device
from vescale_rng._cuda.fill import Place, source, touched
from vescale_rng._cuda.generator_state import GraphGenerator
from vescale_rng._cuda.kernels import have_triton
from vescale_rng._cuda.map_check import PLACE, check_capture, compare_kernel
from vescale_rng._cuda.recipes import Recipe
from vescale_rng._cuda.spans import spans_of
from vescale_rng._cuda.thread_map import Segment
from vescale_rng._distributions import Distribution
from vescale_rng._errors import DeviceError, DistributionError
from vescale_rng._layout.fill_plan import FillPlan
from vescale_rng._layout.layout import ShardLayout, is_row_major, whole

# Ten are reserved, and a generator's offset is rounded up to a multiple of four.
WORDS = 12


@dataclass(frozen=True, eq=False)
class EachOf(Distribution):
    """`Tensor.bernoulli_` with these probabilities, one for every element."""

    p: torch.Tensor

    def __post_init__(self) -> None:
        """Take a tensor, unlike those of one number."""

    def draw(self, out: torch.Tensor, generator: torch.Generator | None) -> None:
        """See `Distribution.draw`."""
        out.bernoulli_(self.p, generator=generator)


class BernoulliRoutes:
    """Whether the kernel gives torch's bits on one device, for each dtype."""

    def __init__(self, device: Drawer) -> None:
        self._device = device
        self._lock = RLock()
        self._found: dict[torch.dtype, str] = {}

    def why_not(self, dtype: torch.dtype) -> str:
        """Say why there is no kernel for tensors of a dtype, or nothing.

        Raises:
            DistributionError: torch has no probabilities for the dtype.
            DeviceError: a CUDA graph is being captured and this was not checked before.
        """
        with self._lock:
            if dtype not in self._found:
                check_capture(self._device.device, f"bernoulli_ for {dtype}")
                self._found[dtype] = self._ask(dtype)
            return self._found[dtype]

    def _ask(self, dtype: torch.dtype) -> str:
        device = self._device.device
        # More elements than the grid of any other random kernel has threads, and no round number.
        expected = torch.empty(2 * self._device.threads + 777, dtype=dtype, device=device)
        # All probabilities, the ends included, where u <= p and u < p differ.
        p = torch.linspace(0, 1, expected.numel(), dtype=_p_dtype(dtype), device=device)
        try:
            end = self._device.draw(EachOf(p), expected, PLACE)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise DistributionError(f"bernoulli_ for {dtype}: torch says {reason!r}") from error
        if not have_triton():
            return "triton is not installed (pip install 'vescale-rng[triton]')"
        # The words moved do not depend on the size; where they do, it is another kernel.
        if end != PLACE.offset + WORDS:
            return f"torch moves the generator by {end - PLACE.offset} words instead of {WORDS}"

        def draw_by_kernel() -> torch.Tensor:
            found = torch.zeros_like(expected)
            _by_kernel(whole(found.shape), p, found, PLACE)
            return found

        return compare_kernel(draw_by_kernel, expected)


@cache
def bernoulli_routes_of(index: int) -> BernoulliRoutes:
    """Return what has been found out on the CUDA device of that index."""
    return BernoulliRoutes(cuda_device(index))


def fill_each_cuda(
    plan: FillPlan,
    p: torch.Tensor,
    local: torch.Tensor,
    generator: torch.Generator | GraphGenerator | None,
) -> None:
    """Draw into `local` with the probabilities `p`, and move the generator on."""
    routes = bernoulli_routes_of(local.device.index)
    if isinstance(generator, GraphGenerator):
        fill_each_from(plan, p, local, generator, routes)
        generator.offset.add_(WORDS)
        return
    generator = generator or cuda_state.default_of(local.device)
    place = cuda_state.read(generator)
    fill_each_from(plan, p, local, place, routes)
    cuda_state.write(generator, place.after(WORDS))


def fill_each_from(
    plan: FillPlan, p: torch.Tensor, local: torch.Tensor, place: Place, routes: BernoulliRoutes
) -> None:
    """Draw into `local` from `place`; `p` has the memory order of `local`."""
    if not is_row_major(plan.layout.global_shape, plan.layout.memory_order):
        raise DeviceError(
            "bernoulli_ with a tensor of probabilities on CUDA: in which order torch goes through "
            f"a tensor of memory order {plan.layout.memory_order} depends on how the whole of the "
            "probabilities lies in memory; draw into a row-major tensor and copy"
        )
    if why := routes.why_not(local.dtype):
        raise DeviceError(
            f"bernoulli_ with a tensor of probabilities for {local.dtype} on CUDA: {why}, and a "
            "piece of it cannot be drawn without the kernel"
        )
    _by_kernel(plan.layout, p.to(_p_dtype(local.dtype)), local, place)


def _p_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch compares."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _by_kernel(layout: ShardLayout, p: torch.Tensor, local: torch.Tensor, place: Place) -> None:
    from vescale_rng._cuda.kernels.launch import Job, launch

    # The number of threads plays no part: there are as many as it takes.
    job = Job(Recipe(4, "at_most"), source(place), 256, map="quads", given=p)
    everything = Segment(0, prod(layout.global_shape), 0)
    for span in spans_of(layout, None):
        launch(job, local, span, everything)
    touched(local)
