"""The native policy on CUDA: the numbers of torch on one GPU, for any boxes of a tensor.

A kernel computes every element by itself, where it has been found to give torch's bits; otherwise
torch draws complete waves from a shifted offset, and the shard's elements are copied out.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vescale_rng._cuda import generator_state as cuda_state
from vescale_rng._cuda.device import Drawer, cuda_device, threads_of
from vescale_rng._cuda.generator_state import CudaPosition, GraphGenerator
from vescale_rng._cuda.map_check import Route, Routes, routes_of
from vescale_rng._cuda.recipes import recipe_of
from vescale_rng._cuda.spans import spans_of
from vescale_rng._cuda.thread_map import Segments, segments_of
from vescale_rng._cuda.waves import WINDOW, Waves
from vescale_rng._distributions import Distribution
from vescale_rng._errors import DeviceError
from vescale_rng._layout.fill_plan import FillPlan
from vescale_rng._layout.layout import ShardLayout
from vescale_rng._layout.window_plan import WindowPlan, window_plan_of

if TYPE_CHECKING:
    from vescale_rng._cuda.kernels.launch import WordSource

Place = CudaPosition | GraphGenerator


@dataclass(frozen=True)
class Launch:
    """One op on one device, ready to be drawn in parts.

    Attributes:
        device: the device that draws.
        distribution: what is drawn.
        route: by which means.
        threads: those whose numbers they are.
        segments: the launches of the global op.
    """

    device: Drawer
    distribution: Distribution
    route: Route
    threads: int
    segments: Segments


def fill_cuda(
    plan: FillPlan,
    distribution: Distribution,
    local: torch.Tensor,
    generator: torch.Generator | GraphGenerator | None,
) -> None:
    """Draw a distribution into `local`, and leave its generator where the global op does."""
    threads = threads_of(local.device)
    device, routes = cuda_device(local.device.index), routes_of(local.device.index)
    if not plan.numel:
        # Nothing is drawn, but what torch refuses is refused.
        routes.accept(distribution, local.dtype)
        return
    if isinstance(generator, GraphGenerator):
        words = fill_from(plan, distribution, local, generator, routes, device, threads)
        # On the device, in the order of its stream: a captured graph moves the offset at each
        # replay.
        generator.offset.add_(words)
        return
    generator = generator or cuda_state.default_of(local.device)
    # With another model's threads even a global tensor is drawn by the kernel.
    if plan.whole and threads == device.threads:
        if not torch.cuda.is_current_stream_capturing():
            # Refused in the same words as on a rank that holds less.
            routes.accept(distribution, local.dtype)
        box = plan.layout.boxes[0]
        # One device's own call, on a tensor of one device's own strides: in a capture, too.
        first = local.storage_offset() + box.local_offset
        distribution.draw(local.as_strided(box.shape, box.local_strides, first), generator)
        return
    place = cuda_state.read(generator)
    words = fill_from(plan, distribution, local, place, routes, device, threads)
    cuda_state.write(generator, place.after(words))


def fill_from(
    plan: FillPlan,
    distribution: Distribution,
    local: torch.Tensor,
    place: Place,
    routes: Routes,
    device: Drawer,
    threads: int,
) -> int:
    """Fill a rank's part from `place`; how far the global op moves a generator, in words."""
    route = routes.route(distribution, local.dtype)
    segments = segments_of(plan.numel, local.element_size(), route.recipe.wave(threads))
    op = Launch(device, distribution, route, threads, segments)
    if route.kernel:
        _by_kernel(plan.layout, op, local, place)
    elif isinstance(place, GraphGenerator):
        raise DeviceError(
            f"{distribution} for {local.dtype}: {route.why}, and without it nothing can be drawn "
            "from a GraphGenerator"
        )
    # Waves are drawn by ATen on this device, with its own threads.
    elif threads != device.threads:
        raise DeviceError(
            f"{distribution} for {local.dtype}: {route.why}, and without it {device.device}, which "
            f"has {device.threads} threads, cannot draw the numbers of a GPU with {threads}"
        )
    else:
        _by_waves(plan, op, local, place)
    # By the global op, whatever was drawn here: all ranks' generators move alike.
    return segments.words


def words_of_fill(distribution: Distribution, dtype: torch.dtype, numel: int, threads: int) -> int:
    """Tell how far an op of `numel` elements moves a CUDA generator, in words; nothing is run."""
    wave = recipe_of(distribution, dtype).wave(threads)
    return segments_of(numel, dtype.itemsize, wave).words


def _by_kernel(layout: ShardLayout, op: Launch, local: torch.Tensor, place: Place) -> None:
    from vescale_rng._cuda.kernels.launch import Job, launch

    job = Job(op.route.recipe, source(place), op.threads)
    for span in spans_of(layout, layout.memory_order):
        for part in op.segments.meeting(span.first, span.stop):
            launch(job, local, span, part)
    touched(local)


def touched(local: torch.Tensor) -> None:
    """Tell autograd that a tensor was written to: a kernel goes behind its back."""
    if not local.is_inference():
        torch.autograd.graph.increment_version(local)


def source(place: Place) -> "WordSource":
    """Tell where a kernel reads its place."""
    from vescale_rng._cuda.kernels.launch import WordSource

    if isinstance(place, GraphGenerator):
        return WordSource(0, 0, (place.seed, place.offset))
    return WordSource(place.seed, place.offset)


def _by_waves(plan: FillPlan, op: Launch, local: torch.Tensor, place: CudaPosition) -> None:
    wave = op.route.recipe.wave(op.threads)
    room = Waves.room(_window_plan_of(plan.layout, wave).longest, wave, plan.numel)
    # An empty rank needs no scratch: it draws nothing.
    scratch = local.new_empty(room if local.numel() else 0)

    def draw(out: torch.Tensor, words: int) -> None:
        op.device.draw(op.distribution, out, place.after(words))

    copy_windows(plan.layout, wave, Waves(draw, op.segments, wave, scratch), local)


def copy_windows(layout: ShardLayout, wave: int, waves: Waves, local: torch.Tensor) -> None:
    """Draw the windows that have local elements, and copy those out."""
    for window in _window_plan_of(layout, wave).windows():
        values = waves.take(window.start, window.stop)
        for piece in window.pieces:
            first = values.storage_offset() + piece.start - window.start
            drawn = values.as_strided(piece.shape, piece.strides, first)
            first = local.storage_offset() + piece.local_offset
            local.as_strided(piece.shape, piece.local_strides, first).copy_(drawn)


def _window_plan_of(layout: ShardLayout, wave: int) -> WindowPlan:
    # Several waves, so that the one that is drawn in vain before a window weighs little.
    window = max(WINDOW, 4 * wave)
    return layout.remembered(("waves", window), lambda: window_plan_of(layout, window))
