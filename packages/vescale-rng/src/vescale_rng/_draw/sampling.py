"""Draws without a tensor to fill: permutations, and samples of categories."""

from math import prod

import torch

from vescale_rng import _portable as portable
from vescale_rng._arguments import checked
from vescale_rng._cpu.stream import advance
from vescale_rng._cpu.stream_ops import Multinomial
from vescale_rng._distributions import Exponential
from vescale_rng._draw.devices import check_device, cpu_generator
from vescale_rng._draw.fill import fill_
from vescale_rng._errors import DistributionError, LayoutError
from vescale_rng._layout.fill_plan import plan_for
from vescale_rng._layout.layout import Box, LayoutLike, ShardLayout, as_layout
from vescale_rng._layout.local_like import make_like
from vescale_rng._policy import policy


@checked()
def randperm(
    n: int,
    layout: LayoutLike | None = None,
    *,
    dtype: torch.dtype = torch.int64,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw `torch.randperm`, or this rank's part of it.

    Every place of a permutation depends on all before it, so every rank draws all of it:
    time and memory grow with `n`.

    Args:
        n: how many numbers are permuted: 0 to n - 1.
        layout: which places this rank gets, of a tensor of one dim; None is all of them.
        dtype: of the result.
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Raises:
        LayoutError: the layout is not one of a tensor of shape (n,).
        DistributionError: n is negative, or too large for the dtype.
    """
    generator = cpu_generator(generator)
    # Before anything is drawn: a layout that does not fit leaves the generator where it was.
    held = None if layout is None else as_layout(layout)
    if held is not None and held.global_shape != (n,):
        raise LayoutError(
            f"`layout`: randperm(n={n}) has the shape ({n},), the layout is of one of "
            f"{held.global_shape}"
        )
    whole = _permutation(n, dtype, generator)
    if held is None:
        return whole
    # In the order of the local tensor, which may be another than that of the boxes.
    boxes = sorted(held.boxes, key=lambda box: box.local_offset)
    parts = [whole.narrow(0, box.global_offset[0], box.shape[0]) for box in boxes]
    return torch.cat([whole[:0], *parts])


def _permutation(n: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    drawn = generator
    if policy() == "portable":
        # torch checks these arguments itself, with a generator that is used for nothing else.
        drawn = torch.Generator()
    try:
        whole = torch.randperm(n, dtype=dtype, generator=drawn, device="cpu")
    except RuntimeError as error:
        raise DistributionError(f"randperm({n}, dtype={dtype}): torch says {error}") from error
    if policy() == "portable" and n:
        # Only where there are elements: torch draws nothing for n = 0, and neither do we.
        key = portable.draw_key(generator, whole.device)
        whole.copy_(portable.permutation(n, key, whole.device))
    return whole


@checked()
def multinomial(
    probabilities: torch.Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    layout: LayoutLike,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw `torch.multinomial` of the global tensor: the samples of this rank's rows.

    Args:
        probabilities: this rank's rows, each of them complete, of floating point and on CPU; or one
            complete row of one dim.
        num_samples: samples of each row.
        replacement: whether a category may be sampled more than once in a row.
        layout: which rows of the global tensor these are.
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Returns:
        int64, of shape (local rows, num_samples), or (num_samples,) for one dim.

    Raises:
        LayoutError: a row is sharded, or the layout does not cover `probabilities`.
        DistributionError: torch refuses the rows of this rank, the number of samples or the dtype.
        DeviceError: the tensor or the generator is not on CPU.
    """
    check_device(probabilities, "probabilities")
    # Samples have no gradient, as torch's have none: a policy samples what it is trained on.
    probabilities = probabilities.detach()
    generator = cpu_generator(generator)
    held = as_layout(layout)
    plan_for(held, probabilities)
    _check_rows(held, probabilities)
    op = Multinomial(num_samples, replacement)
    # Refuses by the global shape, so that all ranks do, also one without rows.
    op.words(held.global_shape, probabilities.dtype)
    if policy() == "portable":
        return _by_races(probabilities, op, held, generator)
    if replacement and num_samples > 1:
        return _with_replacement(probabilities, op, held, generator)
    return _without_replacement(probabilities, op, held, generator)


def _check_rows(layout: ShardLayout, local: torch.Tensor) -> None:
    ndim = len(layout.global_shape)
    if ndim not in (1, 2) or local.ndim != ndim:
        raise LayoutError(
            "multinomial takes probabilities of one or two dims, got a local tensor of shape "
            f"{tuple(local.shape)} of a global one of shape {layout.global_shape}"
        )
    # A sample is a race of all categories of a row: a part of them has no winner.
    categories = layout.global_shape[-1]
    if local.shape[-1] != categories or any(b.shape[-1] != categories for b in layout.boxes):
        raise LayoutError(
            f"multinomial samples from whole rows of {categories} categories, and the local tensor "
            f"has {local.shape[-1]} of them: shard another dim, or replicate"
        )


def _by_races(
    local: torch.Tensor, op: Multinomial, layout: ShardLayout, generator: torch.Generator
) -> torch.Tensor:
    """Draw the portable policy's samples: races of exponentials that start at one key."""
    _ask_torch(local, op)
    rows, held = local, layout
    if local.ndim == 1:
        shape = (1, *layout.global_shape)
        boxes = tuple(Box((0, 0), (1, *b.shape), 0, (0, *b.local_strides)) for b in layout.boxes)
        rows, held = local.unsqueeze(0), ShardLayout(shape, boxes)
    if not prod(held.global_shape):
        return local.new_empty((*local.shape[:-1], op.num_samples), dtype=torch.int64)
    key = portable.draw_key(generator, local.device)
    # Each row by its own number in the global tensor, so no rank passes by others.
    won = portable.winners(rows, op, held, key)
    return won if local.ndim == 2 else won[0]


def _without_replacement(
    local: torch.Tensor, op: Multinomial, layout: ShardLayout, generator: torch.Generator
) -> torch.Tensor:
    # The race of exponentials of ATen/native/Distributions.cpp, with the same torch ops.
    _ask_torch(local, op)
    # The race has the strides of the probabilities: torch's kernel fills it in memory order.
    race, held = make_like(local, layout)
    fill_(race, Exponential(1.0), held, generator)
    # In place, as ATen does it: another temporary would double what a large vocabulary takes.
    torch.div(local, race, out=race)
    if op.num_samples == 1:
        return race.argmax(dim=-1, keepdim=True)
    # The k largest of one race are k samples without replacement (Efraimidis and Spirakis 2006).
    return race.topk(op.num_samples).indices


def _ask_torch(local: torch.Tensor, op: Multinomial) -> torch.Tensor:
    """Sample these rows from another generator, so that torch refuses what it refuses."""
    if not local.numel():
        return local
    elsewhere = torch.Generator(local.device).manual_seed(0)
    return _torchs(local, op, elsewhere)


def _with_replacement(
    local: torch.Tensor, op: Multinomial, layout: ShardLayout, generator: torch.Generator
) -> torch.Tensor:
    rows = local if local.ndim == 2 else local.unsqueeze(0)
    result = rows.new_empty((rows.shape[0], op.num_samples), dtype=torch.int64)
    # Of one row: torch draws them row after row.
    each = op.words((1, *layout.global_shape[-1:]), local.dtype)
    total = layout.global_shape[0] if local.ndim == 2 else 1
    _ask_torch(local, op)
    # Rows of other ranks are passed by; each row takes the same number of words.
    here = 0
    for start, count, place in sorted(_stretches(layout, local)):
        advance((start - here) * each, generator)
        # Row after row, each sample from one draw: so any stretch of rows is drawn by itself.
        result[place : place + count] = _torchs(rows[place : place + count], op, generator)
        here = start + count
    # Where one device stands after all rows, on every rank.
    advance((total - here) * each, generator)
    return result if local.ndim == 2 else result[0]


def _stretches(layout: ShardLayout, local: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return (first global row, how many, first local row) of each box."""
    if local.ndim == 1:
        return [(0, 1, 0)] if local.numel() else []
    step = local.stride(0)
    return [
        (b.global_offset[0], b.shape[0], b.local_offset // step) for b in layout.boxes if b.shape[0]
    ]


def _torchs(rows: torch.Tensor, op: Multinomial, generator: torch.Generator) -> torch.Tensor:
    try:
        return torch.multinomial(rows, op.num_samples, op.replacement, generator=generator)
    except RuntimeError as error:
        # The first line: the rest is a stack of C++, other on every machine.
        reason = str(error).splitlines()[0]
        raise DistributionError(f"{op} of rows of this rank: torch says {reason!r}") from error
