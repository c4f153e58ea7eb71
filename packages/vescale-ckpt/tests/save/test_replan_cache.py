"""An asynchronous save may go by the plan of the one before, and then saves the same as one that
plans anew: whatever changes in between, on whichever rank."""

import os
import random
import threading
from contextlib import suppress

import pytest
import torch
import vescale_ckpt as ckpt
import vescale_ckpt._save.async_save
from emulated_ranks import on_ranks, piece_of, sharded, succeed
from vescale_ckpt._save.async_save import async_save_with
from vescale_ckpt._save.save import SaveOptions
from vescale_ckpt._save.staging_queue import StagingQueue
from vescale_ckpt._storage.local import LocalStorage


@pytest.fixture(autouse=True)
def threads_wait_for_nobody(monkeypatch):
    """The ranks here are threads, but none waits for its turn."""
    monkeypatch.setattr("vescale_ckpt._save.save.have_own_processes", lambda processes: True)


@pytest.fixture
def planned(monkeypatch):
    """Ranks that planned a save anew, in order."""
    ranks = []
    prepare = vescale_ckpt._save.async_save.prepare_save

    def counted(storage, coordinator, *rest):
        ranks.append(coordinator.rank)
        return prepare(storage, coordinator, *rest)

    monkeypatch.setattr("vescale_ckpt._save.async_save.prepare_save", counted)
    return ranks


def save_in_turn(turns, root, *, max_bytes=1 << 20, check_replicas=True, storage=None):
    """Save `turns[n][rank]` as `root/n`; each rank's list of None or the exception of each turn."""
    stagings = []

    def one(coordinator, staging, n):
        state = turns[n][coordinator.rank]
        options = SaveOptions(check_replicas=check_replicas)
        path = f"{root}/{n}"
        on = storage or LocalStorage()
        handle = async_save_with(on, coordinator, path, state, options, staging)
        for tensor in state.values():
            # What is copied is copied: training may go on.
            if hasattr(tensor, "local"):
                tensor.local.fill_(-7)
        handle.wait(20)

    def work(coordinator):
        staging = ckpt.Staging(max_bytes=max_bytes)
        stagings.append(staging)
        outcomes = []
        for n in range(len(turns)):
            try:
                outcomes.append(one(coordinator, staging, n))
            except Exception as error:
                outcomes.append(error)
            # The error that the handle has told.
            with suppress(ckpt.StateError):
                staging.wait()
        return outcomes

    found = succeed(on_ranks(len(turns[0]), work))
    assert all(staging.buffers.allocated <= max_bytes for staging in stagings)
    return found


def turn_of(whole, ranks, **more):
    return [{"w": piece, **more} for piece in sharded(whole, ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("max_bytes", [1 << 20, 600])
def test_values_change_and_the_layout_does_not(tmp_path, planned, ranks, max_bytes):
    wholes = [torch.randn(20, 10) for _ in range(4)]
    turns = [
        turn_of(whole, ranks, step=n, copied=torch.full((3,), float(n)), own=ckpt.RankLocal([n]))
        for n, whole in enumerate(wholes)
    ]
    assert save_in_turn(turns, tmp_path, max_bytes=max_bytes) == [[None] * 4] * ranks
    assert sorted(planned) == list(range(ranks))
    for n, whole in enumerate(wholes):
        found = ckpt.read(tmp_path / str(n))
        assert found["w"].equal(whole)
        assert found["copied"].tolist() == [n] * 3
        assert (found["step"], found["own"]) == (n, ckpt.PerRank(([n],) * ranks))
        ckpt.verify(tmp_path / str(n))


def one_key_more(states):
    states[1]["more"] = torch.ones(2)


def another_dtype(states):
    states[0]["copied"] = states[1]["copied"] = torch.ones(3, dtype=torch.float64)


def no_key(states):
    del states[1]["copied"]


def other_boxes(states):
    whole = torch.arange(200.0).reshape(20, 10)
    states[0]["w"] = piece_of(whole, [((0, 0), (3, 10))])
    states[1]["w"] = piece_of(whole, [((3, 0), (17, 10))])


@pytest.mark.parametrize("change", [one_key_more, another_dtype, no_key, other_boxes])
def test_what_changes_on_any_rank_is_planned_anew(tmp_path, planned, change):
    whole = torch.arange(200.0).reshape(20, 10)
    turns = [turn_of(whole, 2, copied=torch.ones(3)) for _ in range(4)]
    change(turns[2])
    expected = {**turns[2][0], **turns[2][1], "w": whole}
    expected = {k: v.clone() for k, v in expected.items()}
    assert save_in_turn(turns, tmp_path) == [[None] * 4] * 2
    # The first, the changed one, and the one after it, which is as the first again.
    assert sorted(planned) == [0, 0, 0, 1, 1, 1]
    found = ckpt.read(tmp_path / "2")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    assert ckpt.read(tmp_path / "3")["w"].equal(whole)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_what_one_rank_cannot_save_raises_on_all(tmp_path, bad):
    whole = torch.randn(20, 10)
    turns = [turn_of(whole, 3) for _ in range(3)]
    turns[1][bad]["x"] = object()
    for before, refused, after in save_in_turn(turns, tmp_path):
        assert before is after is None
        assert isinstance(refused, ckpt.StateError)
        assert f"rank {bad} of 3" in str(refused)
    assert sorted(os.listdir(tmp_path)) == ["0", "2"]


def differs(kind, rank):
    value = float(rank == 1)
    return {
        "value": value,
        "tensor": torch.full((3,), value),
        "wrapped": ckpt.Replicated(torch.full((300_000,), value)),
    }[kind]


@pytest.mark.parametrize("kind", ["value", "tensor", "wrapped"])
def test_copies_that_differ_are_found_in_the_background(tmp_path, planned, kind):
    whole = torch.randn(20, 10)
    turns = [turn_of(whole, 3) for _ in range(3)]
    for n, states in enumerate(turns):
        for rank, state in enumerate(states):
            state["same"] = differs(kind, rank if n == 1 else 0)
    for before, refused, after in save_in_turn(turns, tmp_path, max_bytes=4 << 20):
        assert before is after is None
        assert isinstance(refused, ckpt.StateError)
        assert "rank 1" in str(refused) or "rank(s) [1]" in str(refused)
        assert "'same'" in str(refused)
    assert sorted(planned) == [0, 1, 2]
    assert sorted(os.listdir(tmp_path)) == ["0", "2"]


def test_copies_that_nobody_wants_compared(tmp_path, planned):
    turns = [[{"same": torch.full((3,), float(rank))} for rank in range(2)] for _ in range(2)]
    assert save_in_turn(turns, tmp_path, check_replicas=False) == [[None] * 2] * 2
    assert sorted(planned) == [0, 1]
    assert ckpt.read(tmp_path / "1")["same"].unique().numel() == 1


def test_a_place_that_is_taken_raises_at_once_on_all(tmp_path):
    whole = torch.randn(20, 10)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "notes").write_text("mine")
    turns = [turn_of(whole, 2) for _ in range(3)]
    for before, refused, after in save_in_turn(turns, tmp_path):
        assert before is after is None
        assert isinstance(refused, ckpt.ExistsError)
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


class _Interrupted(BaseException):
    """As KeyboardInterrupt, which the test runner would take for its own."""


@pytest.mark.parametrize("turn", [0, 1])
def test_an_interrupt_of_one_rank_while_it_copies_is_told_to_all(tmp_path, monkeypatch, turn):
    whole = torch.randn(20, 10)
    turns = [turn_of(whole, 2) for _ in range(2)]
    copy = StagingQueue._copy
    ended = []

    def interrupted(self, source):
        if threading.current_thread() in doomed:
            raise _Interrupted
        return copy(self, source)

    doomed = set()
    monkeypatch.setattr(StagingQueue, "_copy", interrupted)

    def work(coordinator):
        staging = ckpt.Staging()
        for n in range(turn + 1):
            if n == turn and coordinator.rank == 1:
                doomed.add(threading.current_thread())
            state = turns[n][coordinator.rank]
            path = f"{tmp_path}/{n}"
            try:
                async_save_with(LocalStorage(), coordinator, path, state, SaveOptions(), staging)
                staging.wait()
            except _Interrupted:
                ended.append("interrupted")
                with pytest.raises(
                    ckpt.CheckpointError, match="rank 1 of 2: copying the state failed"
                ):
                    staging.wait()
            except ckpt.CheckpointError as error:
                ended.append(str(error))

    succeed(on_ranks(2, work))
    assert len(ended) == 2
    assert "interrupted" in ended
    assert any("rank 1 of 2: copying the state failed" in words for words in ended)
    assert sorted(os.listdir(tmp_path)) == [str(n) for n in range(turn)]


def test_planned_anew_where_directories_are_not_renamed(tmp_path):
    """Rank 0 has made its directory, by the plan of before, when the other one says no."""

    class WithoutRenames(LocalStorage):
        renames = False

    whole = torch.arange(200.0).reshape(20, 10)
    turns = [turn_of(whole, 2) for _ in range(3)]
    turns[1][1]["more"] = torch.ones(2)
    assert save_in_turn(turns, tmp_path, storage=WithoutRenames()) == [[None] * 3] * 2
    assert ckpt.read(tmp_path / "1")["more"].tolist() == [1, 1]


def random_state(rng, whole_of):
    """The states of all ranks, and what they hold together."""
    ranks, expected = 3, {}
    states = [{} for _ in range(ranks)]
    for name, whole in whole_of.items():
        whole.copy_(torch.randint(-9, 9, whole.shape))
        if rng.random() < 0.2:
            continue
        expected[name] = whole.clone()
        if rng.random() < 0.3:
            for rank in rng.sample(range(ranks), rng.randint(1, ranks)):
                states[rank][name] = whole.clone()
        else:
            for state, piece in zip(states, sharded(whole, ranks), strict=True):
                state[name] = piece
    return states, expected


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_states(tmp_path, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    shapes = [(7,), (4, 3), (1, 5), (9, 2), (2, 2, 2)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.int8]
    whole_of = {
        f"t{i}": torch.zeros(shape, dtype=rng.choice(dtypes)) for i, shape in enumerate(shapes)
    }
    turns, expected, layout = [], [], 0
    for _ in range(6):
        layout = layout if rng.random() < 0.5 else rng.random()
        states, whole = random_state(random.Random(layout), whole_of)
        turns.append(states)
        expected.append(whole)
    assert save_in_turn(turns, tmp_path, max_bytes=rng.choice([100, 1 << 20])) == [[None] * 6] * 3
    for n, whole in enumerate(expected):
        found = ckpt.read(tmp_path / str(n))
        assert found.keys() == whole.keys()
        assert all(found[name].equal(tensor) for name, tensor in whole.items())
