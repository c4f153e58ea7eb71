"""What ranks read is, put together, what one device reads, in its order, and each row is read once.

Also after a resumption on another number of ranks, with workers, and for streams.
"""

import random
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from vescale_comm import simulate
from vescale_parallel import DisagreementError, Loader, Plan, PlanError, loader, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel._data.rows import without_rows

PLAN = Plan(batch_is="local")
Sizes = dict[str, int]


class Rows(Dataset[dict[str, Any]]):
    """Row i holds i; it counts what is read."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, list[int]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return {"x": torch.tensor([index, -index]), "y": float(index), "name": f"row {index}"}


class Stream(IterableDataset[Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.size).unsqueeze(1))


def seen(batch: dict[str, Any]) -> list[int]:
    rows: list[int] = batch["x"][:, 0].tolist()
    assert batch["x"].shape == (len(rows), 2)
    assert batch["y"].dtype == torch.float64
    assert batch["name"] == [f"row {row}" for row in rows]
    return rows


def world(sizes: Sizes) -> int:
    return torch.Size(sizes.values()).numel()


def made(sizes: Sizes, dataset: Any, *args: Any, **options: Any) -> Loader:
    return loader(dataset, make_mesh(device_type="cpu", **sizes), PLAN, *args, **options)


def case(seed: int) -> tuple[int, int, dict[str, Any]]:
    draws = random.Random(seed)
    words = {"shuffle": draws.random() < 0.7, "drop_last": draws.random() < 0.3}
    return draws.randint(1, 23), draws.randint(1, 9), words


@pytest.mark.parametrize("own", [False, True], ids=["torch's generator", "own generator"])
@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 3}, {"dp": 1}], ids=str)
def test_together_ranks_read_what_one_device_reads(sizes: Sizes, own: bool):
    def on_a_rank(rank: int, world_size: int, seed: int) -> tuple[Any, ...]:
        size, batch_size, words = case(seed)
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed) if own else None
        dataset = Rows(size)
        reads = made(sizes, dataset, batch_size, generator=generator, **words)
        epochs = [[seen(one) for one in reads] for _ in range(2)]
        assert len(reads) == len(epochs[0])
        state = torch.get_rng_state() if generator is None else generator.get_state()
        return epochs, dataset.read, state.tolist()

    for seed in range(12):
        size, batch_size, words = case(seed)
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed) if own else None
        plain = DataLoader(Rows(size), batch_size, generator=generator, **words)
        expected = [[seen(one) for one in plain] for _ in range(2)]
        state = torch.get_rng_state() if generator is None else generator.get_state()
        found = simulate(world(sizes)).run(on_a_rank, seed)
        step = sizes.get("tp", 1)
        for number, epoch in enumerate(expected):
            parts = [epochs[number] for epochs, _, _ in found[::step]]
            assert [[row for part in at for row in part] for at in zip(*parts, strict=True)] == (
                epoch
            )
        for rank, (epochs, read, own_state) in enumerate(found):
            mine = [row for epoch in epochs for part in epoch for row in part]
            assert found[rank - rank % step][0] == epochs
            assert own_state == state.tolist()
            # One that never has a row reads one, to know the form.
            assert read == mine or (not mine and len(read) == 1)


@pytest.mark.parametrize("own", [False, True], ids=["torch's generator", "own generator"])
def test_a_run_goes_on_in_the_middle_of_an_epoch_on_other_ranks(own: bool):
    def reads(rank: int, world_size: int, sizes: Sizes, size: int, state: Any, stop: int) -> Any:
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(3) if own else None
        dataset = Rows(21)
        mine = made(sizes, dataset, size, shuffle=True, generator=generator)
        if state is not None:
            torch.randn(7)  # what else draws is not the loader's
            mine.load_state_dict(state)
            # Saved again before anything is read, as a run does that is stopped at once.
            again, mine = (
                mine.state_dict(),
                made(sizes, dataset, size, shuffle=True, generator=generator),
            )
            mine.load_state_dict(again)
            dataset.read.clear()
        before = torch.get_rng_state()
        found: list[list[int]] = []
        for one in mine:
            found.append(seen(one))
            if len(found) == stop:
                return found, mine.state_dict(), dataset.read
        if state is not None and not own:
            assert torch.equal(before, torch.get_rng_state())
        second = [seen(one) for one in mine]
        return found, second, dataset.read

    def together(found: list[Any], part: int) -> list[int]:
        return [
            row for at in zip(*(one[part] for one in found), strict=True) for r in at for row in r
        ]

    whole = simulate(1).run(reads, {"dp": 1}, 5, None, 99)
    for stop, after, size in [
        (1, {"dp": 3}, 5),
        (2, {"dp": 1}, 5),
        (3, {"dp": 4}, 4),
        (5, {"dp": 2}, 5),
    ]:
        first = simulate(2).run(reads, {"dp": 2}, 5, None, stop)
        state = first[0][1]
        assert all(one[1]["samples"] == state["samples"] for one in first)
        rest = simulate(world(after)).run(reads, after, size, state, 99)
        assert together(first, 0) + together(rest, 0) == together(whole, 0)
        if own:
            assert together(rest, 1) == together(whole, 1)
        assert sum(len(one[2]) for one in rest) <= 21 - state["samples"] + 21 + world(after)


class Halves(Sampler[int]):
    """Draws by a sampler that it holds, and by a generator of its own."""

    def __init__(self, size: int) -> None:
        self.inner = RandomSampler(range(size), generator=torch.Generator().manual_seed(1))
        self.draws = [torch.Generator().manual_seed(2)]

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[int]:
        for one in self.inner:
            yield one if torch.rand((), generator=self.draws[0]) < 0.5 else 0


def weighted(size: int) -> Any:
    generator = torch.Generator().manual_seed(4)
    return WeightedRandomSampler(torch.arange(1.0, size + 1), size, generator=generator)


SAMPLERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "weighted": lambda size: {"batch_size": 4, "sampler": weighted(size)},
    "without replacement": lambda size: {
        "batch_size": 4,
        "sampler": SubsetRandomSampler(range(size), torch.Generator().manual_seed(6)),
    },
    "held": lambda size: {"batch_size": 4, "sampler": Halves(size)},
    "batches": lambda size: {"batch_sampler": BatchSampler(weighted(size), 4, False)},
    "with that of the loader": lambda size: {
        "batch_size": 4,
        "sampler": weighted(size),
        "generator": torch.Generator().manual_seed(8),
    },
}


@pytest.mark.parametrize("stop", [0, 1, 3])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_samplers_with_generators_of_their_own_go_on(kind: str, stop: int):
    """In the epoch that is resumed, and in later ones; `stop` 0: between two epochs."""

    def on_a_rank(rank: int, world_size: int) -> None:
        whole = made({"dp": 2}, Rows(11), **SAMPLERS[kind](11))
        epochs = [[seen(one) for one in whole] for _ in range(4)]
        left = made({"dp": 2}, Rows(11), **SAMPLERS[kind](11))
        list(left)
        found = iter(left) if stop else iter(())
        first = [seen(next(found)) for _ in range(stop)]
        resumed = made({"dp": 2}, Rows(11), **SAMPLERS[kind](11))
        list(resumed)
        list(resumed)
        resumed.load_state_dict(left.state_dict())
        rest = [[seen(one) for one in resumed] for _ in range(3)]
        assert [first + rest[0], *rest[1:]] == epochs[1:]
        plain = DataLoader(Rows(11), **SAMPLERS[kind](11))
        ours = [seen(one) for one in made({"dp": 1, "tp": 2}, Rows(11), **SAMPLERS[kind](11))]
        assert ours == [seen(one) for one in plain]

    simulate(2)(on_a_rank)


def test_samplers_whose_generators_are_not_kept_are_told():
    def on_a_rank(rank: int, world_size: int) -> None:
        sampler = Halves(5)
        sampler.draws = random.Random(0)
        reads = made({"dp": 2}, Rows(5), 2, sampler=sampler)
        with pytest.raises(PlanError, match=r"the sampler draws by 'draws \(Random\)'"):
            reads.state_dict()
        saved = made({"dp": 2}, Rows(5), 2, sampler=Halves(5)).state_dict()
        assert set(saved["samplers"]) == {"draws", "inner.generator"}
        other = made({"dp": 2}, Rows(5), 2, sampler=weighted(5))
        other.load_state_dict(saved)
        with pytest.raises(PlanError, match="the sampler here has 'generator'"):
            iter(other)

    simulate(2)(on_a_rank)


class Backwards:
    """A batch sampler with an epoch: uneven batches, from the end."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[9 - self.epoch, 8], [7, 6, 5, 4, 3], [2]])


def test_batch_samplers_samplers_collation_and_epochs():
    def on_a_rank(rank: int, world_size: int) -> tuple[Any, ...]:
        reads = made({"dp": 2}, Rows(10), batch_sampler=Backwards())
        first = [seen(one) for one in reads]
        reads.set_epoch(1)
        parts = iter(reads)
        second = [seen(next(parts))]
        again = made({"dp": 2}, Rows(10), batch_sampler=Backwards())
        again.load_state_dict(reads.state_dict())
        second += [seen(one) for one in again]
        sampled = made(
            *({"dp": 2}, Rows(10), 4),
            sampler=[3, 1, 4, 1, 5],
            collate_fn=lambda rows: torch.tensor([row["y"] for row in rows]),
        )
        return first, second, [one.tolist() for one in sampled], len(reads)

    one, two = simulate(2)(on_a_rank)
    assert one == ([[9], [7, 6, 5], [2]], [[8], [7, 6, 5], [2]], [[3, 1], [5]], 3)
    assert two == ([[8], [4, 3], []], [[8], [4, 3], []], [[4, 1], []], 3)


@pytest.mark.parametrize("dp", [2, 3])
def test_a_stream_is_shared_and_resumed(dp: int):
    def on_a_rank(rank: int, world_size: int) -> tuple[Any, ...]:
        reads = made({"dp": dp}, Stream(10), 4)
        parts = iter(reads)
        found = [next(parts).flatten().tolist()]
        other = made({"dp": dp}, Stream(10), 4)
        other.load_state_dict(reads.state_dict())
        return found + [one.flatten().tolist() for one in other]

    found = simulate(dp)(on_a_rank)
    whole = [[row for part in at for row in part] for at in zip(*found, strict=True)]
    assert whole == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_resumed_with_another_size_amid_a_batch():
    def on_a_rank(rank: int, world_size: int) -> list[Any]:
        reads = made({"dp": 2}, Rows(9), batch_sampler=[[0, 1, 2, 3], [4, 5, 6, 7], [8]])
        next(iter(reads))
        other = made({"dp": 2}, Rows(9), batch_sampler=[[0, 1, 2], [], [3, 4, 5], [6, 7, 8]])
        other.load_state_dict(reads.state_dict())
        stream = made({"dp": 2}, Stream(9), 4)
        next(iter(stream))
        for options in ({"batch_size": 3}, {"batch_size": 4, "num_workers": 2}):
            resumed = made({"dp": 2}, Stream(9), **options)
            resumed.load_state_dict(stream.state_dict())
            with pytest.raises(PlanError, match="Resume it"):
                iter(resumed)
        return [seen(one) for one in other]

    assert simulate(2)(on_a_rank) == [[[4], [6, 7]], [[5], [8]]]


class FailsOnce(Rows):
    """A file system that is away when it is first asked for."""

    fails = False

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.fails:
            self.fails = False
            raise OSError("away")
        return super().__getitem__(index)


@pytest.mark.parametrize("own", [False, True], ids=["torch's generator", "own generator"])
@pytest.mark.parametrize("stop", [0, 2])
def test_a_first_read_that_fails_keeps_the_position(stop: int, own: bool):
    def on_a_rank(rank: int, world_size: int) -> list[list[int]]:
        def fresh(dataset: Rows) -> Loader:
            torch.manual_seed(3)
            generator = torch.Generator().manual_seed(3) if own else None
            return made({"dp": 2}, dataset, 4, shuffle=True, generator=generator)

        reads, found = fresh(Rows(12)), list[list[int]]()
        state = reads.state_dict()
        for one in reads if stop else ():
            found.append(seen(one))
            if len(found) == stop:
                state = reads.state_dict()
                break
        again = FailsOnce(12)
        resumed = fresh(again)
        resumed.load_state_dict(state)
        again.fails = True
        before = torch.get_rng_state()
        with pytest.raises(OSError, match="away"):
            iter(resumed)
        assert not stop or torch.equal(before, torch.get_rng_state())
        if not (stop or own):  # torch's own generator is the caller's
            torch.set_rng_state(before)
        assert resumed.state_dict()["samples"] == state["samples"]
        return found + [seen(one) for one in resumed]

    def whole(rank: int, world_size: int) -> list[list[int]]:
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(3) if own else None
        return [
            seen(one) for one in made({"dp": 2}, Rows(12), 4, shuffle=True, generator=generator)
        ]

    assert simulate(2)(on_a_rank) == simulate(2)(whole)


def test_strings_of_tuples_in_a_batch_without_rows():
    def on_a_rank(rank: int, world_size: int) -> list[Any]:
        return [list(one[1]) for one in made({"dp": 2}, [(0, "a"), (1, "b"), (2, "c")], 2)]

    assert simulate(2)(on_a_rank) == [[["a"], ["c"]], [["b"], []]]


def with_workers(rank: int, world_size: int, make: Callable[[], Any]) -> list[Any]:
    torch.manual_seed(1)
    reads = made({"dp": 2}, make(), 4, num_workers=2, shuffle=not isinstance(make(), Stream))
    return [one if isinstance(one, Tensor) else one["x"][:, :1] for one in reads]


def rows_of_ten() -> Any:
    return Rows(10)


def stream_of_ten() -> Any:
    return Stream(10)


@pytest.mark.parametrize("make", [rows_of_ten, stream_of_ten])
def test_workers_change_nothing(make: Callable[[], Any]):
    torch.manual_seed(1)
    streams = isinstance(make(), Stream)
    plain = DataLoader(make(), 4, num_workers=2 if streams else 0, shuffle=not streams)
    expected = [one if isinstance(one, Tensor) else one["x"][:, :1] for one in plain]
    one, two = simulate(2)(with_workers, make)
    for parts in zip(one, two, expected, strict=True):
        assert torch.equal(torch.cat(parts[:2]), parts[2])


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        found = self.inner(batch["x"].float() / 10).sum(1) - batch["y"].float()
        return nn.functional.dropout(found, 0.2).square().mean()


def losses(model: nn.Module, batches: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_it_trains_like_one_device_with_uneven_and_empty_rows():
    def on_a_rank(rank: int, world_size: int) -> list[float]:
        torch.manual_seed(2)
        mesh = make_mesh(device_type="cpu", dp=3)
        model = parallelize(Regression(), mesh, PLAN)
        return losses(model, loader(Rows(14), mesh, PLAN, 4, shuffle=True))

    torch.manual_seed(2)
    expected = losses(Regression(), DataLoader(Rows(14), 4, shuffle=True))
    for found in simulate(3)(on_a_rank):
        assert found == pytest.approx(expected, rel=1e-5)


def test_ranks_in_other_states_are_told():
    def on_a_rank(rank: int, world_size: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        reads = made({"dp": 2}, Rows(4), 2, shuffle=True, generator=generator)
        with pytest.raises(DisagreementError, match="generator"):
            iter(reads)

    simulate(2)(on_a_rank)


def test_samplers_that_differ_are_told_at_the_end_of_the_epoch():
    def on_a_rank(rank: int, world_size: int) -> None:
        reads = made({"dp": 2}, Rows(4), 2, sampler=[0, 1, 2, 2 + rank])
        with pytest.raises(DisagreementError, match="digest"):
            list(reads)

    simulate(2)(on_a_rank)


@pytest.mark.parametrize(
    ("plan", "dataset", "words", "message"),
    [
        (Plan(), Rows(3), {}, "batch_is='local'"),
        (PLAN, Rows(3), {"batch_size": 2, "batch_sampler": [[0]]}, "say batch_size or"),
        (PLAN, Rows(3), {"sampler": [0], "shuffle": True}, "exclude each other"),
        (PLAN, Stream(3), {"shuffle": True}, "its own order"),
        (PLAN, Rows(3), {"batch_size": None}, "say batch_size or"),
        (PLAN, Rows(3), {"num_workers": 2, "in_order": False}, "different batches"),
    ],
)
def test_what_cannot_be_loaded(plan: Plan, dataset: Any, words: dict[str, Any], message: str):
    def on_a_rank(rank: int, world_size: int) -> None:
        with pytest.raises(PlanError, match=message):
            loader(dataset, make_mesh(device_type="cpu", dp=1), plan, **words)

    simulate(1)(on_a_rank)


class Named(NamedTuple):
    x: Tensor
    name: Any


@dataclass
class Record:
    x: Tensor
    names: list[str]
    more: Named


def test_names_in_batches_without_rows():
    batch = Record(torch.ones(2, 3), ["a", "b"], Named(torch.ones(2), ("a", "b")))
    empty = without_rows(batch)
    assert (type(empty), empty.x.shape, empty.names) == (Record, (0, 3), [])
    assert (type(empty.more), empty.more.x.shape, empty.more.name) == (Named, (0,), ())
    assert batch.names == ["a", "b"]
    assert without_rows(UserDict(x=torch.ones(2), name=["a", "b"]))["name"] == []
