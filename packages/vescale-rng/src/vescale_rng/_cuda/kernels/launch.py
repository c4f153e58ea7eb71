"""Launches a kernel for a span, a recipe and a place in the stream."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from vescale_rng._cuda.kernels.fill import OPTIONS, fill_span
from vescale_rng._cuda.recipes import Recipe
from vescale_rng._cuda.spans import Span
from vescale_rng._cuda.thread_map import WORDS_PER_TURN, Segment

_BLOCK = 1024


@dataclass(frozen=True)
class WordSource:
    """Where the words come from.

    Attributes:
        seed: 64 bits; unused where `memory` is.
        words: the offset of the op's first word, without what `memory` says.
        memory: a seed and an offset in device memory, read when the kernel runs.
    """

    seed: int
    words: int
    memory: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True)
class Job:
    """What a kernel does: the same for every span of a tensor.

    Attributes:
        recipe: the words and the arithmetic.
        source: where the words come from.
        threads: of the device whose numbers they are.
        map: "grid", "vectors" or "quads": which words an element has.
        given: probabilities with the strides of the local tensor, for the kind "at_most".
    """

    recipe: Recipe
    source: WordSource
    threads: int
    map: str = "grid"
    given: torch.Tensor | None = None


def launch(job: Job, local: torch.Tensor, span: Span, part: Segment) -> None:
    """Fill what a span of `local` has of one segment of the op."""
    flat = _from(local, span.local_first)
    given = flat if job.given is None else _from(job.given, span.local_first)
    # Pointers that are not read must still be pointers.
    memory = job.source.memory or (flat, flat)
    counter = (job.source.words + part.words) // WORDS_PER_TURN
    first = span.first - part.start
    values = (job.source.seed, counter, *job.recipe.parameters, first)
    halves = [half for value in values for half in _halves(value)]
    grid = (-(-span.count // _BLOCK),)
    with _on(local.device):
        fill_span[grid](
            flat,
            given,
            *memory,
            *halves,
            part.stop - part.start,
            span.count,
            *span.shape[1:],
            *span.global_strides,
            *span.local_strides,
            KIND=job.recipe.kind,
            MAP=job.map,
            THREADS=job.threads,
            UNROLL=job.recipe.unroll,
            DOUBLE=job.recipe.double,
            WIDE=span.wide,
            FROM_MEMORY=job.source.memory is not None,
            BLOCK=_BLOCK,
            **OPTIONS,
        )


def _from(tensor: torch.Tensor, first: int) -> torch.Tensor:
    """Return a tensor of the same memory that begins `first` elements further."""
    flat = tensor.as_strided((1,), (1,), tensor.storage_offset() + first)
    # The kernel stores 0 and 1 where the dtype is bool.
    return flat.view(torch.uint8) if flat.dtype == torch.bool else flat


def _halves(value: int) -> Iterator[int]:
    """Yield the signed 32-bit halves of 64 bits: of one type, so that nothing is compiled anew."""
    for half in (value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF):
        yield half - (1 << 32) if half >> 31 else half


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
