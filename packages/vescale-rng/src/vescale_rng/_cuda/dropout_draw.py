"""The local parts of a dropout mask on CUDA: by the kernel, or by torch from shifted offsets."""

from collections.abc import Iterator

import torch

from vescale_rng._cuda.dropout_map import DropoutOp, DropoutShape, vector_of
from vescale_rng._cuda.fill import Place, source
from vescale_rng._cuda.generator_state import CudaPosition
from vescale_rng._cuda.spans import spans_of
from vescale_rng._cuda.waves import WINDOW, Waves
from vescale_rng._layout.layout import ShardLayout


def by_kernel(
    layout: ShardLayout, drop: DropoutShape, op: DropoutOp, place: Place, mask: torch.Tensor
) -> None:
    from vescale_rng._cuda.kernels.launch import Job, launch

    name, recipe = drop.recipe(op.p, op.dtype)
    job = Job(recipe, source(place), drop.threads, map=name)
    for span in spans_of(layout, drop.order(layout).memory_order):
        launch(job, mask, span, drop.segments.parts[0])


def waves_of(drop: DropoutShape, op: DropoutOp, place: CudaPosition, widest: int) -> Waves:
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
