"""Random numbers of samples: each sample's belong to its number in the epoch, whoever reads it.

What comes before a sample on one device is read by other ranks here, and how much it draws is not
known. So samples are read by seeds of their own, and leave generators where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, get_worker_info
from vescale_comm.generators import States, generators_of, mixed

_OF_COLLATION = 1


class SampleRequest(NamedTuple):
    """A sample: what the dataset is asked for, and the seed of its random numbers."""

    index: Any
    seed: int


class SampleBatch(NamedTuple):
    """What a dataset has given for some samples, and the seed of the first of them."""

    samples: Any
    seed: int


class SeededSamples(Dataset[Any]):
    """Reads samples of a dataset by their seeds; in all else it passes for that dataset.

    The functions of workers ask it for attributes, and set them (`worker_init_fn`).
    """

    def __init__(self, dataset: Any) -> None:
        vars(self).update(_seeded_dataset=dataset, _seeded_draws=False)

    def __getattr__(self, name: str) -> Any:
        # Not those by which objects are copied and pickled: of a copy nothing is there yet.
        if name.startswith("__") or "_seeded_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self._seeded_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._seeded_dataset, name, value)

    def __len__(self) -> int:
        return len(self._seeded_dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._seeded_dataset[index]

    def __getitems__(self, wanted: Sequence[SampleRequest]) -> SampleBatch:
        """Read samples of one batch; torch's loaders call this for all of them at once."""
        dataset = self._seeded_dataset
        states = States(generators_of(dataset), default=True)
        indices = [one.index for one in wanted]
        try:
            if not self._seeded_draws:
                found = _read(dataset, indices)
                if not states.moved():
                    return SampleBatch(found, wanted[0].seed)
                # Most datasets draw nothing, and to seed costs ten microseconds a sample: those
                # that do read their first batch twice.
                vars(self)["_seeded_draws"] = True
            return SampleBatch(_read_one_by_one(dataset, wanted, states), wanted[0].seed)
        finally:
            states.restore()


def _read(dataset: Any, indices: list[Any]) -> Any:
    together = getattr(dataset, "__getitems__", None)
    return together(indices) if together else [dataset[one] for one in indices]


def _read_one_by_one(dataset: Any, wanted: Sequence[SampleRequest], states: States) -> Any:
    found = []
    for one in wanted:
        states.seed(one.seed)
        alone = _read(dataset, [one.index])
        if not isinstance(alone, list) or len(alone) != 1:
            # A batch in a form of its own (columns): it is read as one, by its first seed.
            states.seed(wanted[0].seed)
            return _read(dataset, [one.index for one in wanted])
        found += alone
    return found


class CollateRead:
    """Collates what `SeededSamples` has read."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, read: SampleBatch) -> Any:
        return collated(self.collate, read.samples, mixed(read.seed, _OF_COLLATION))


def collated(collate: Callable[[list[Any]], Any], samples: Any, seed: int) -> Any:
    """Collate, with random numbers of this seed; generators stand afterwards where they stood."""
    states = States(default=True)
    # Before, and not where it has drawn: collations of others take samples to pieces.
    states.seed(seed)
    try:
        return collate(samples)
    finally:
        states.restore()


class SeedsOfStream:
    """Seeds of the collations of a stream, of which every rank draws alike but its rows."""

    def __init__(self, shard: int) -> None:
        self._shard, self._calls = shard, 0

    def take(self) -> int:
        """Return the next one."""
        # A worker is seeded once, and this process for each batch.
        self._calls += get_worker_info() is not None
        return mixed(mixed(torch.initial_seed(), self._calls), self._shard)
