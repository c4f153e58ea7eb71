"""What samples draw belongs to their numbers: any ranks, any workers, resumed; generators stay."""

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from vescale_comm import simulate
from vescale_parallel import Loader, Plan, loader
from vescale_parallel import mesh as make_mesh

# More workers than cores are no fault here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def drawn(own: numpy.random.Generator | None = None) -> Tensor:
    found = [torch.rand(()).item(), random.random(), numpy.random.rand()]
    return torch.tensor([*found, 0.0 if own is None else own.random()], dtype=torch.float64)


class Augmented(Dataset[Any]):
    def __init__(self) -> None:
        self.own = numpy.random.default_rng(3)

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        return index, drawn(self.own)


class Together(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[one] for one in indices]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(11):
            yield index, drawn()


def states() -> list[Any]:
    numbers = numpy.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), (*numbers[1], *numbers[2:])]


def reads(kind: type, ranks: int, workers: int) -> Loader:
    words: dict[str, Any] = {} if kind is Stream else {"shuffle": True}
    mesh = make_mesh(device_type="cpu", dp=ranks)
    return loader(kind(), mesh, Plan(batch_is="local"), 4, num_workers=workers, **words)


def epochs(rank: int, world_size: int, kind: type, workers: int, stop: int | None) -> Any:
    torch.manual_seed(2)
    # Nobody has to seed these alike.
    random.seed(rank)
    numpy.random.seed(rank)
    before = states()
    batches, found, position = reads(kind, world_size, workers), [], None
    for one in batches:
        found.append(one)
        if stop == len(found):
            position = batches.state_dict()
            break
    if position is not None:
        batches = reads(kind, world_size, workers)
        batches.load_state_dict(position)
        torch.randn(5)  # what else draws does not matter
        found += list(batches)
    else:
        found += list(batches)  # a second epoch
    after = states()
    assert before[1:] == after[1:]
    return found, after[0]


def whole(found: list[Any]) -> list[list[Any]]:
    batches = zip(*(one[0] for one in found), strict=True)
    return [
        [
            (index.item(), *numbers.tolist())
            for indices, draws in parts
            for index, numbers in zip(indices, draws, strict=True)
        ]
        for parts in batches
    ]


CASES = [
    (ranks, workers)
    for ranks in (1, 2, 3, 4)
    for workers in (0, 1, 3)
    if (ranks, workers) != (1, 0)
]
CORE = {(4, 0), (2, 1)}


@pytest.mark.parametrize("kind", [Augmented, Together])
@pytest.mark.parametrize(
    ("ranks", "workers"),
    [pytest.param(*one, marks=() if one in CORE else pytest.mark.slow) for one in CASES],
)
def test_samples_draw_the_same_whoever_reads_them(kind: type, ranks: int, workers: int):
    alone = simulate(1).run(epochs, Augmented, 0, None)
    expected = whole(alone)
    assert len({row for batch in expected for row in batch}) == 22
    found = simulate(ranks).run(epochs, kind, workers, None)
    assert whole(found) == expected
    assert all(one[1] == alone[0][1] for one in found)
    assert whole(simulate(ranks).run(epochs, kind, workers, 2)) == expected[:3]


@pytest.mark.parametrize(
    ("ranks", "workers"),
    [pytest.param(*one, marks=() if one in CORE else pytest.mark.slow) for one in CASES],
)
def test_streams_draw_the_same_on_any_number_of_ranks(ranks: int, workers: int):
    alone = simulate(1).run(epochs, Stream, workers, None)
    expected = whole(alone)
    # Each worker has the whole stream.
    assert len({row[1:] for batch in expected for row in batch}) == 22 * max(1, workers)
    found = simulate(ranks).run(epochs, Stream, workers, None)
    assert whole(found) == expected
    assert all(one[1] == alone[0][1] for one in found)
    once = expected[: len(expected) // 2]
    assert whole(simulate(ranks).run(epochs, Stream, workers, 1)) == once


def test_collation_draws_otherwise_on_each_rank_and_batch():
    def masked(rows: list[int]) -> Tensor:
        return torch.rand(1).expand(len(rows)).clone()

    def on_a_rank(rank: int, world_size: int) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        mesh = make_mesh(device_type="cpu", dp=2)
        batches = loader(range(8), mesh, Plan(batch_is="local"), 4, collate_fn=masked)
        return [one[0].item() for one in batches], torch.get_rng_state().tolist()

    (one, first), (two, second) = simulate(2)(on_a_rank)
    assert len({*one, *two}) == 4
    assert first == second


@pytest.mark.parametrize("workers", [0, 2])
def test_batch_samplers_are_resumed_with_workers(workers: int):
    def on_a_rank(rank: int, world_size: int) -> list[list[int]]:
        def made() -> Loader:
            mesh = make_mesh(device_type="cpu", dp=1)
            batches = [[0, 1], [2, 3], [4]]
            words = {"batch_sampler": batches, "num_workers": workers}
            return loader(range(5), mesh, Plan(batch_is="local"), **words)

        first = made()
        found = [next(iter(first)).tolist()]
        second = made()
        second.load_state_dict(first.state_dict())
        return found + [one.tolist() for one in second] + [one.tolist() for one in second]

    (found,) = simulate(1)(on_a_rank)
    assert found == [[0, 1], [2, 3], [4], [0, 1], [2, 3], [4]]


def test_workers_find_the_dataset_that_was_passed():
    batches = []

    def on_a_rank(rank: int, world_size: int) -> None:
        mesh = make_mesh(device_type="cpu", dp=1)
        made = loader(
            Augmented(), mesh, Plan(batch_is="local"), 4, num_workers=1, worker_init_fn=set_length
        )
        batches.extend(made)

    simulate(1)(on_a_rank)
    assert [len(one[0]) for one in batches] == [4, 4, 3]


def set_length(number: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.opened = number
    assert dataset.opened == number
    assert isinstance(dataset.own, numpy.random.Generator)
