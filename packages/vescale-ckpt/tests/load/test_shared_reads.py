"""What several ranks of a machine need is read once if they share, and is the same either way."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from edited_checkpoint import damage
from emulated_ranks import assert_filled, load_on, piece_of, save_on, sharded, succeed
from resharding import CountingStorage, layouts
from vescale_ckpt import CoordinationError, CorruptError, MismatchError, load, save, verify
from vescale_ckpt._coordination.pipe_barrier import PipeBarrier
from vescale_ckpt._inspect.inspect import read_full_tensor
from vescale_ckpt._load import shared_reads
from vescale_ckpt._load.open import open_checkpoint
from vescale_ckpt._load.reads import plan_reads
from vescale_ckpt._load.shared_reads import fetch_shared, needs_of, plan_sharing
from vescale_ckpt._storage.local import LocalStorage
from vescale_ckpt._tensors.local_boxes import local_and_boxes

testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")


@pytest.fixture(autouse=True)
def threads_share(monkeypatch):
    """The ranks here are threads, but none waits for its turn."""
    monkeypatch.setattr(
        "vescale_ckpt._load.shared_reads.have_own_processes", lambda processes: True
    )


WHOLE = torch.arange(6_000_000, dtype=torch.int32).reshape(3000, 2000)


def load_columns(path, ranks, **how):
    """Load columns of what was saved, on so many ranks."""
    into = sharded(WHOLE, ranks, 1, fill=False)
    succeed(load_on([{"w": p} for p in into], path, **how))
    for piece in into:
        assert_filled(piece, WHOLE)


@pytest.mark.parametrize("arena", [1 << 20, 16 << 20])
def test_read_once(path, monkeypatch, arena):
    monkeypatch.setattr("vescale_ckpt._load.shared_reads.ARENA_BYTES", arena)
    succeed(save_on([{"w": p} for p in sharded(WHOLE, 3)], path))
    for share, amplified in ((True, 1), (False, 4)):
        storages = [CountingStorage() for _ in range(4)]
        load_columns(path, 4, storages=storages, share=share)
        read = sum(storage.bytes for storage in storages)
        assert read / WHOLE.nbytes == pytest.approx(amplified, rel=0.05)
        # Each takes its share of the reading.
        assert max(s.bytes for s in storages) <= 1.5 * read / 4


class CountedTensors(dict):
    """Counts how often all of it is walked through."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()

    def items(self):
        self.walks += 1
        return super().items()


def test_many_tensors_are_not_walked_through_for_each_of_them(path, monkeypatch):
    monkeypatch.setattr("vescale_ckpt._load.shared_reads.WORTH_BYTES", 1)
    wholes = {f"w{i}": torch.full((6, 2), float(i)) for i in range(30)}
    pieces = {name: sharded(whole, 3) for name, whole in wholes.items()}
    succeed(save_on([{n: p[rank] for n, p in pieces.items()} for rank in range(3)], path))
    storage = LocalStorage()
    opened = open_checkpoint(storage, path)
    tensors = CountedTensors(opened.manifest.tensors)
    counted = replace(opened, manifest=replace(opened.manifest, tensors=tensors))
    targets = [(name, *local_and_boxes(torch.zeros(6, 2))) for name in wholes]
    needs = needs_of(plan_reads(counted.manifest, targets))
    answers = [{"host": "a", "offer": ["", "", n], "needs": needs} for n in range(2)]
    assert len(plan_sharing(counted, answers, remote=False)["a"].slabs) == 90
    for name, whole in wholes.items():
        assert read_full_tensor(storage, counted, name).equal(whole)
    monkeypatch.setattr("vescale_ckpt._inspect.verify.open_checkpoint", lambda *_: counted)
    assert verify(path).files == 3
    assert tensors.walks <= 4


@pytest.mark.parametrize("saved_by", [1, 3, 4])
@pytest.mark.parametrize("slab", [64, 1 << 20])
def test_any_layout_to_any_where_everything_is_shared(path, monkeypatch, saved_by, slab):
    monkeypatch.setattr("vescale_ckpt._load.shared_reads.WORTH_BYTES", 1)
    monkeypatch.setattr("vescale_ckpt._load.shared_reads.ARENA_BYTES", 2000)
    monkeypatch.setattr("vescale_ckpt._load.reads.SLAB_BYTES", slab)
    wholes = {"even": torch.randn(12, 8), "uneven": torch.randn(7, 5), "few": torch.randn(2, 3)}
    saved = {
        f"{size} {kind}": pieces
        for size, whole in wholes.items()
        for kind, pieces in layouts(whole, saved_by, gap=1).items()
    }
    succeed(save_on([{k: p[r] for k, p in saved.items()} for r in range(saved_by)], path))
    shared = []
    monkeypatch.setattr(
        "vescale_ckpt._load.load.fetch_shared", lambda *a: shared.append(1) or fetch_shared(*a)
    )
    for loaded_by in (2, 3, 5):
        for wanted in ("rows", "columns", "interleaved", "ragged"):
            into = {
                name: layouts(wholes[name.split()[0]], loaded_by, gap=2, fill=False)[wanted]
                for name in saved
            }
            states = [{k: p[r] for k, p in into.items()} for r in range(loaded_by)]
            succeed(load_on(states, path))
            for name, pieces in into.items():
                for piece in pieces:
                    assert_filled(piece, wholes[name.split()[0]])
    assert len(shared) >= 10


def test_some_share_and_some_is_ones_own(path):
    succeed(save_on([{"w": WHOLE, "own": torch.arange(2_000_000)}], path))
    rows = [[((0, 0), (3000, 2000))], [((0, 0), (3000, 2000))], []]
    into = [{"w": piece_of(WHOLE, regions, fill=False)} for regions in rows]
    into[2]["own"] = torch.zeros(2_000_000, dtype=torch.int64)
    succeed(load_on(into, path, share=True))
    for state in into:
        assert_filled(state["w"], WHOLE)
    assert into[2]["own"].equal(torch.arange(2_000_000))


def test_without_memory_to_share_each_reads_for_itself(path, monkeypatch):
    def none_left(self, name, nbytes):
        raise OSError("no space left")

    monkeypatch.setattr("vescale_ckpt._coordination.shared_memory.SharedMemory.attach", none_left)
    succeed(save_on([{"w": WHOLE}], path))
    load_columns(path, 2, share=True)


@pytest.mark.parametrize("cut_off", [0, 1, 2])
def test_if_one_rank_is_out_of_reach_each_reads_for_itself(path, monkeypatch, cut_off):
    attach = PipeBarrier.attach

    def refused(self, names):
        if self.rank == cut_off:
            raise OSError("not permitted")
        attach(self, names)

    monkeypatch.setattr(PipeBarrier, "attach", refused)
    succeed(save_on([{"w": WHOLE}], path))
    told = []
    load_columns(path, 3, progress=lambda *both: told.append(both))
    # Each read all of it, and blocks at the ends of its slabs twice.
    assert sum(done == total for done, total in told) == 3
    assert all(WHOLE.nbytes <= total < 1.06 * WHOLE.nbytes for _, total in told)


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="only Linux tells")
def test_nothing_stays_open(path):
    succeed(save_on([{"w": WHOLE}], path))
    before = open_descriptors()
    load_columns(path, 2)
    assert open_descriptors() == before
    other = [{"w": p, "x": torch.ones(1)} for p in sharded(WHOLE, 2, 1, fill=False)]
    outcomes = load_on(other, path)
    assert [type(outcome) for outcome in outcomes] == [MismatchError] * 2
    del outcomes
    assert open_descriptors() == before


def test_damage_in_what_is_shared_fails_all(path):
    succeed(save_on([{"w": WHOLE}], path))
    damage(path, -12_000_000, byte=b"\xff")
    into = sharded(WHOLE, 4, 1, fill=False)
    outcomes = load_on([{"w": p} for p in into], path, share=True)
    assert [type(outcome) for outcome in outcomes] == [CorruptError] * 4
    assert len({str(outcome) for outcome in outcomes}) == 1


def save_and_load_simulated(rank, world_size, path):
    save(path, {"w": sharded(WHOLE, 3)[rank]})
    into = sharded(WHOLE, 3, 1, fill=False)[rank]
    load(path, {"w": into})
    assert_filled(into, WHOLE)


def test_simulated_ranks_that_take_turns_do_not_wait_for_each_other(path, monkeypatch):
    monkeypatch.undo()
    pytest.importorskip("vescale_comm").simulate(3)(save_and_load_simulated, path)


def load_shared(rank, world_size, path):
    into = sharded(WHOLE, world_size, 1, fill=False)[rank]
    load(path, {"w": into}, share=True)
    assert_filled(into, WHOLE)


def test_real_processes(path):
    succeed(save_on([{"w": WHOLE}], path))
    testing.run(load_shared, 3, path)


def die_while_sharing(rank, world_size, path):
    if rank == 1:
        shared_reads._fill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        load(path, {"w": sharded(WHOLE, world_size, 1, fill=False)[rank]})
    except CoordinationError as error:
        with open(f"{path}-{rank}", "w") as file:
            file.write(str(error))


def test_a_rank_that_is_killed_while_others_wait_for_it(path):
    succeed(save_on([{"w": WHOLE}], path))
    with pytest.raises(testing.WorkerError, match=r"rank 1 died \(signal SIGKILL\)"):
        testing.outcomes(die_while_sharing, 3, path, timeout=50)
    for rank in (0, 2):
        with open(f"{path}-{rank}") as file:
            assert "lost the other ranks" in file.read()
