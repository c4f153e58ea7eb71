"""Chooses the samples of each batch that one rank reads, and collates those of a stream."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Final, NamedTuple

from torch.utils.data import Sampler
from vescale_comm.generators import mixed
from vescale_comm.nested import field_names, map_tensors, with_fields

from vescale_parallel._common.rows import row_counts
from vescale_parallel._data.draws import SampleRequest, SeedsOfStream, collated

_LEAVES: Final = (str, bytes, int, float, type(None))


class Share(NamedTuple):
    """The part of each batch that a rank reads: that many shards by axis, and the number of its."""

    sizes: tuple[int, ...]
    shard: int

    def of(self, samples: Sequence[Any]) -> list[Any]:
        """Return the samples of this rank."""
        counts = row_counts(len(samples), self.sizes)
        start = sum(counts[: self.shard])
        return list(samples[start : start + counts[self.shard]])


class Batch(NamedTuple):
    """A batch of one device, as one rank sees it.

    Attributes:
        samples: of the whole batch.
        read: of this rank.
        first: the first of the whole batch, read where a rank without rows has seen none yet.
        digest: of which samples it has.
    """

    samples: int
    read: int
    first: Any
    digest: int


class SkippingSampler(Sampler[Any]):
    """A sampler that can begin after some samples: those are drawn, and not read."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler, self.skip = sampler, 0

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        iterator = iter(self.sampler)
        # Drawn all the same: the generator has to end where it would have.
        for _ in range(skip):
            next(iterator, None)
        yield from iterator

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class RowsOfBatches(Sampler[list[SampleRequest]]):
    """This rank's samples of each batch of one device; batches without any are left out.

    torch's `DataLoader` reads ahead; so what each batch was like is put down for the loader, which
    takes it up when the batch is passed on.
    """

    def __init__(self, batches: Iterable[Sequence[Any]], share: Share) -> None:
        self.batches, self.share = batches, share
        self.noted: deque[Batch] = deque()
        # Of the epoch: from it and a sample's number follows the seed of its random numbers.
        self.skip, self.seed, self.number = 0, 0, 0

    def __iter__(self) -> Iterator[list[SampleRequest]]:
        # Not a generator itself: an iterator that was left halfway must not note into a new queue.
        self.noted = deque()
        # Not reset: with workers torch asks for an iterator twice, and goes by the second.
        return self._walk(self.noted, self.skip, self.number, self.seed)

    def _walk(
        self, noted: deque[Batch], skip: int, number: int, seed: int
    ) -> Iterator[list[SampleRequest]]:
        after = number
        for one in self.batches:
            samples = list(one)
            number, after = after, after + len(samples)
            if skip and skip >= len(samples):
                skip -= len(samples)
                continue
            # Of a batch that was passed on in part, as another size cut them, what is left of it.
            samples, number, skip = samples[skip:], number + skip, 0
            mine = self.share.of(range(len(samples)))
            first = samples[0] if samples else None
            noted.append(Batch(len(samples), len(mine), first, zlib.crc32(repr(samples).encode())))
            if mine:
                yield [SampleRequest(samples[at], mixed(seed, number + at)) for at in mine]


class CollateRows:
    """Collates this rank's samples of a batch that every rank has taken from the stream."""

    def __init__(self, collate: Callable[[list[Any]], Any], share: Share) -> None:
        self.collate, self.share = collate, share
        self.seeds = SeedsOfStream(share.shard)

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        """Return how many samples the whole batch has, and the rows of this rank."""
        mine = self.share.of(samples)
        found = collated(self.collate, mine or samples[:1], self.seeds.take())
        return len(samples), found if mine else without_rows(found)


def without_rows(batch: Any) -> Any:
    """Return a batch of the same form and no rows; scalars, which have none, stay."""
    return _emptied(
        map_tensors(lambda one: one[:0].clone() if one.ndim else one, batch, copies=True)
    )


def _emptied(value: Any) -> Any:
    """Lists of strings and the like, which collation leaves as lists of one a sample, without."""
    if isinstance(value, list) and all(isinstance(one, _LEAVES) for one in value):
        return []
    # Of samples that are tuples, torch collates strings to tuples; numbers it makes tensors.
    if type(value) is tuple and value and all(isinstance(one, str | bytes) for one in value):
        return ()
    if isinstance(value, tuple | list):
        items = [_emptied(one) for one in value]
        # A named tuple is made of its fields; its strings are lists by now, one for each field.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        for key in list(value):
            value[key] = _emptied(value[key])
        return value
    names = field_names(value)
    return with_fields(value, {n: _emptied(getattr(value, n)) for n in names}) if names else value
