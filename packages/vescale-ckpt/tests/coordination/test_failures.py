"""A failure on any rank fails the save or load on all of them, says why, and commits nothing."""

import os

import pytest
import torch
import vescale_ckpt as ckpt
from edited_checkpoint import damage
from emulated_ranks import load_on, save_on, sharded, succeed
from faulty_storage import FaultyStorage, broken_disk, disk_full_once
from vescale_ckpt._storage.local import LocalStorage

RANKS = 3
WHOLE = torch.arange(300.0).reshape(30, 10)


def states():
    return [{"w": piece} for piece in sharded(WHOLE, RANKS)]


def assert_all_raised(outcomes, kind, *words):
    assert [type(outcome) for outcome in outcomes] == [kind] * len(outcomes)
    assert len({str(outcome) for outcome in outcomes}) == 1
    for word in words:
        assert word in str(outcomes[0])


@pytest.mark.parametrize("fault", [disk_full_once, broken_disk])
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("overwrite", [False, True])
def test_every_operation_that_fails_fails_the_save_on_all_ranks(tmp_path, fault, rank, overwrite):
    word = {disk_full_once: "No space left", broken_disk: "Input/output error"}[fault]
    for at in range(1, 60):
        path = f"{tmp_path}/{at}/step"
        if overwrite:
            ckpt.save(path, {"w": torch.zeros(3)})
        storages = [FaultyStorage(at if r == rank else None, fault) for r in range(RANKS)]
        outcomes = save_on(states(), path, storages=storages, overwrite=overwrite)
        if not any(outcomes):
            # Either no operation was left to fail, or only tidying up after the commit did.
            assert ckpt.read(path)["w"].equal(WHOLE)
            if len(storages[rank].log) < at:
                break
            assert any(op.startswith("remove") for op in storages[rank].log[at - 1 :])
            continue
        assert_all_raised(outcomes, ckpt.StorageError, f"rank {rank} of {RANKS}", word)
        check_nothing_committed(path, storages[rank], fault, overwrite=overwrite)
    else:
        pytest.fail("a save should not take 60 operations")


def check_nothing_committed(path, storage, fault, *, overwrite):
    parent = os.path.dirname(path)
    names = os.listdir(parent) if os.path.isdir(parent) else []
    renamed = [op for op in storage.log if op in ("renamed step", "renamed COMMIT")]
    if fault is broken_disk and renamed:
        # Not even the rename could be undone. Then what is there is whole, and the error said so.
        assert ckpt.read(path)["w"].equal(WHOLE)
        return
    assert [n for n in names if not n.startswith(".")] == (["step"] if overwrite else [])
    if overwrite:
        assert ckpt.read(path)["w"].tolist() == [0, 0, 0]
    if fault is disk_full_once:
        assert not [n for n in names if n.startswith(".")], "the staging directory was left behind"


def test_a_refused_object_on_one_rank(path):
    outcomes = save_on([{"a": 1}, {"a": object()}, {"a": 1}], path)
    assert_all_raised(outcomes, ckpt.StateError, "rank 1 of 3", "at 'a'", "object")
    assert not os.path.exists(path)


def test_several_ranks_that_fail_are_all_named(path):
    outcomes = save_on([{"a": 1}, {"a": object()}, {"a": {1, 2}}], path)
    assert_all_raised(outcomes, ckpt.StateError, "rank 1 of 3", "rank(s) 2 failed, too")


def test_what_a_tensor_raises_gets_its_path(path):
    class Broken:
        def __vescale_layout__(self):
            raise RuntimeError("device lost")

        def to_local(self):
            return torch.zeros(1)

    outcomes = save_on([{"a": Broken()}, {"a": Broken()}], path)
    assert_all_raised(outcomes, ckpt.StateError, "at 'a': RuntimeError: device lost")
    ckpt.save(path, {"a": torch.zeros(1)})
    outcomes = load_on([{"a": Broken()}, {"a": Broken()}], path)
    assert_all_raised(outcomes, ckpt.MismatchError, "'a': RuntimeError: device lost")


def test_any_other_exception_becomes_a_checkpoint_error(path):
    def progress(done, total):
        raise KeyError("mine")

    outcomes = save_on(states(), path, progress=progress)
    assert_all_raised(outcomes, ckpt.CheckpointError, "rank 0 of 3: KeyError: 'mine'")
    assert not os.path.exists(path)


def test_existing_paths_are_refused_before_anything_is_written(tmp_path, path):
    ckpt.save(path, {"w": torch.zeros(3)})
    assert_all_raised(save_on(states(), path), ckpt.ExistsError, "pass overwrite=True")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    for overwrite in (False, True):
        outcomes = save_on(states(), tmp_path / "mine", overwrite=overwrite)
        assert_all_raised(outcomes, ckpt.ExistsError, "is not a checkpoint")
        outcomes = save_on(states(), tmp_path / "mine" / "thesis.tex", overwrite=overwrite)
        assert_all_raised(outcomes, ckpt.ExistsError, "is not a checkpoint")
    assert sorted(os.listdir(tmp_path)) == ["mine", "step-1"]
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_an_empty_directory_is_free(tmp_path):
    (tmp_path / "empty").mkdir()
    succeed(save_on(states(), tmp_path / "empty"))
    assert ckpt.read(tmp_path / "empty")["w"].equal(WHOLE)


DISAGREEING = [
    ({"x": 1}, {"x": 2}, "at 'x': rank 0 holds 1 and rank 1 holds 2. Wrap it in RankLocal"),
    ({"x": 1}, {"x": 1.0}, "rank 0 holds 1 and rank 1 holds 1.0"),
    ({"x": [1]}, {"x": [1, 2]}, "rank 0 holds [1] and rank 1 holds [1, 2]"),
    ({"x": {"y": (1,)}}, {"x": {"y": [1]}}, "at 'x/y'"),
    ({"x": torch.zeros(2)}, {"x": torch.zeros(3)}, "shape (3,), a rank before it"),
    ({"x": torch.zeros(2)}, {"x": torch.ones(2)}, "rank(s) [1] hold other values than rank 0"),
    ({"x": torch.zeros(2)}, {"x": 0}, "at 'x'"),
]


@pytest.mark.parametrize(("a", "b", "words"), DISAGREEING)
def test_ranks_that_disagree(path, a, b, words):
    assert_all_raised(save_on([a, b], path), ckpt.StateError, words)
    assert not os.path.exists(path)


def test_copies_that_differ_can_be_allowed(path):
    both = [{"x": torch.zeros(2)}, {"x": torch.ones(2)}]
    succeed(save_on(both, path, check_replicas=False))
    assert ckpt.read(path)["x"].tolist() in ([0, 0], [1, 1])


def test_a_tensor_with_a_hole_or_an_overlap(path):
    first, second, third = sharded(WHOLE, 3)
    outcomes = save_on([{"w": first}, {"w": third}], path)
    assert_all_raised(
        outcomes, ckpt.StateError, "no rank holds 100 of the elements of [0:30, 0:10]"
    )
    half = sharded(WHOLE, 2)[1]
    outcomes = save_on([{"w": first}, {"w": second}, {"w": third}, {"w": half}], path)
    assert_all_raised(outcomes, ckpt.StateError, "overlap")


def test_different_paths(tmp_path):
    from emulated_ranks import on_ranks
    from vescale_ckpt._save.save import SaveOptions, save_with

    outcomes = on_ranks(
        2, lambda c: save_with(LocalStorage(), c, tmp_path / str(c.rank), {"a": 1}, SaveOptions())
    )
    assert_all_raised(outcomes, ckpt.StateError, "different paths")
    assert os.listdir(tmp_path) == []


def test_ranks_may_hold_different_keys(path):
    # The stages of a pipeline.
    succeed(save_on([{"a": torch.zeros(2), "n": 1}, {"b": torch.ones(2), "n": 1}], path))
    assert list(ckpt.read(path)) == ["a", "n", "b"]
    a, b = torch.ones(2), torch.zeros(2)
    succeed(load_on([{"a": a}, {"b": b}], path))
    assert (a.tolist(), b.tolist()) == ([0, 0], [1, 1])


class UnreadableStorage(LocalStorage):
    """A disk that fails when data is read."""

    def open(self, path):
        if path.endswith(".safetensors"):
            raise OSError(5, "Input/output error", path)
        return super().open(path)


def test_a_failing_read_fails_the_load_on_all_ranks(path):
    succeed(save_on(states(), path))
    storages = [LocalStorage(), UnreadableStorage(), LocalStorage()]
    intos = [{"w": piece} for piece in sharded(WHOLE, RANKS, fill=False)]
    outcomes = load_on(intos, path, storages=storages)
    assert_all_raised(
        outcomes, ckpt.StorageError, "rank 1 of 3", "Input/output error", "safetensors"
    )


def test_data_that_only_one_rank_needs_fails_the_load_on_all(path):
    succeed(save_on(states(), path))
    damage(path, file="r00002.safetensors", byte=b"\xff")
    intos = [{"w": piece} for piece in sharded(WHOLE, RANKS, fill=False)]
    words = ("rank 2 of 3", "r00002.safetensors: bytes", "'w' [20:30, 0:10]")
    assert_all_raised(load_on(intos, path), ckpt.CorruptError, *words)


def test_a_file_that_rank_0_cannot_see_is_not_committed(path):
    class OtherDisk(LocalStorage):
        """As on a machine without the shared file system: what is written here stays here."""

        def create(self, path):
            return super().create(path + ".elsewhere")

    outcomes = save_on(states(), path, storages=[LocalStorage(), OtherDisk(), LocalStorage()])
    assert_all_raised(outcomes, ckpt.StorageError, "r00001.safetensors", "all of them share")
    assert not os.path.exists(path)


def test_a_large_copy_that_diverged_is_named(path):
    # Above the size that is compared unasked, and differing in one element of the last of four.
    whole = torch.zeros(400_000)
    odd = whole.clone()
    odd[-1] = 1e-30
    states = [{"x": ckpt.Replicated(t)} for t in (whole, whole, odd, whole)]
    outcomes = save_on(states, path)
    assert_all_raised(
        outcomes, ckpt.StateError, "at 'x'", "rank(s) [2] hold other values than rank 0"
    )
    states = [{"x": ckpt.Replicated(t)} for t in (odd, whole, whole)]
    assert_all_raised(save_on(states, path), ckpt.StateError, "rank(s) [0] hold other values")
    states = [{"x": ckpt.Replicated(t, check=False)} for t in (odd, whole, whole)]
    succeed(save_on(states, path))
    into = [{"x": ckpt.Replicated(torch.zeros(400_000))} for _ in range(2)]
    succeed(load_on(into, path))
    assert into[0]["x"].value.equal(into[1]["x"].value)


def test_what_is_replicated_is_neither_a_shard_nor_one_ranks_own(path):
    outcomes = save_on([{"w": ckpt.Replicated(p)} for p in sharded(WHOLE, 2)], path)
    assert_all_raised(outcomes, ckpt.StateError, "at 'w': a sharded tensor inside a Replicated")
    outcomes = save_on([{"w": ckpt.RankLocal(ckpt.Replicated(1))}], path)
    assert_all_raised(outcomes, ckpt.StateError, "at 'w/~r0': a Replicated inside a RankLocal")


class ChangingStorage(LocalStorage):
    """Changes a tensor between the moment it is looked at and the moment it is written."""

    def __init__(self, tensor):
        self.tensor = tensor

    def create(self, path):
        return ChangingWriter(self.tensor, super().create(path))


class ChangingWriter:
    def __init__(self, tensor, inner):
        self.tensor, self.inner = tensor, inner
        self.finish, self.abandon = inner.finish, inner.abandon

    def write(self, data):
        self.tensor.add_(1)
        self.inner.write(data)


def test_a_tensor_that_changes_while_it_is_saved_can_be_loaded(path):
    tensor = torch.zeros(1_000_000)
    succeed(save_on([{"w": tensor}], path, storages=[ChangingStorage(tensor)]))
    assert tensor.max() > 3
    ckpt.verify(path)
    saved = ckpt.read(path)["w"]
    assert saved.min() >= 0
    assert saved.max() <= tensor.max()
