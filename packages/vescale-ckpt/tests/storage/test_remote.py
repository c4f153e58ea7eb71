"""On a store without renames the commit object is last: a save there is complete or absent, too."""

import uuid

import pytest
import torch
from emulated_ranks import assert_filled, load_on, save_on, sharded, succeed
from vescale_ckpt import (
    CheckpointManager,
    CorruptError,
    ExistsError,
    NotFoundError,
    StorageError,
    UncommittedError,
    async_save,
    load,
    read,
    save,
    verify,
)
from vescale_ckpt.__main__ import main

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
from vescale_ckpt._storage.fsspec_storage import FsspecStorage  # noqa: E402 only where it can work


@pytest.fixture(params=["memory", "local"])
def remote(request, tmp_path):
    """(storage, root): memory://, and the local disk as if it had no renames."""
    if request.param == "memory":
        return FsspecStorage("memory://"), f"memory://{uuid.uuid4().hex}"
    return FsspecStorage("local", fsspec.filesystem("file")), str(tmp_path)


class Stops(Exception):
    pass


class StoppingStorage:
    """Every call that changes the store counts, and from the n-th on nothing reaches it."""

    CHANGES = ("create", "put", "remove_file", "remove_directory", "make_directory")
    renames = False

    def __init__(self, inner, at):
        self.inner, self.at, self.log = inner, at, []

    def __getattr__(self, name):
        def call(*arguments):
            if name in self.CHANGES:
                self.log.append(f"{name} {arguments[0].rpartition('/')[2]}")
                if self.at is not None and len(self.log) >= self.at:
                    raise Stops(self.log[-1])
            return getattr(self.inner, name)(*arguments)

        return call


def states(value):
    return [{"w": piece, "n": value} for piece in sharded(torch.full((30, 4), float(value)), 2)]


def test_any_layout_through_a_store(remote):
    storage, root = remote
    whole = torch.randn(31, 9)
    pieces = [{"w": p} for p in sharded(whole, 3)]
    succeed(save_on(pieces, f"{root}/step", storages=[storage] * 3))
    into = sharded(whole, 2, 1, fill=False)
    succeed(load_on([{"w": p} for p in into], f"{root}/step", storages=[storage] * 2))
    for piece in into:
        assert_filled(piece, whole)
    names = storage.names_in(f"{root}/step")
    assert names[0] == "COMMIT"
    assert len(names) == 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_stops_anywhere(remote, overwrite):
    storage, root = remote
    at, seen = 0, set()
    while True:
        at += 1
        path = f"{root}/{at}"
        if overwrite:
            succeed(save_on(states(1), path, storages=[storage] * 2))
        stopping = StoppingStorage(storage, at)
        outcomes = save_on(states(2), path, storages=[stopping, storage], overwrite=overwrite)
        into = [{"w": p, "n": 0} for p in sharded(torch.zeros(30, 4), 1)]
        (found,) = load_on(into, path, storages=[storage])
        if isinstance(found, Exception):
            assert isinstance(found, (NotFoundError, UncommittedError)), stopping.log
            assert not overwrite
            assert any(outcomes)
        else:
            assert into[0]["w"].local.unique().tolist() == [found["n"]]
            assert found["n"] == (1 if any(outcomes) else 2)
            seen.add(found["n"])
        if len(stopping.log) < at:
            break
    assert seen == ({1, 2} if overwrite else {2})
    assert at > 3


def test_urls_everywhere(tmp_path, capsys):
    root = f"memory://{uuid.uuid4().hex}/run"
    save(f"{root}/a", {"w": torch.ones(3)})
    with pytest.raises(ExistsError):
        save(f"{root}/a", {"w": torch.ones(3)})
    save(f"{root}/a", {"w": torch.full((3,), 2.0)}, overwrite=True)
    async_save(f"{root}/b", {"w": torch.full((3,), 3.0)}).wait()
    assert [read(f"{root}/{n}")["w"][0].item() for n in "ab"] == [2, 3]
    assert load(f"{root}/a", {"w": torch.zeros(3)})["w"].tolist() == [2, 2, 2]
    assert verify(f"{root}/a").tensors == 1
    assert main(["ls", f"{root}/a"]) == 0
    assert main(["diff", f"{root}/a", f"{root}/b"]) == 1
    assert "w  3 of 3 elements differ" in capsys.readouterr().out
    # Two storages: each path is looked up in its own.
    save(f"{tmp_path}/near", {"w": torch.zeros(3)})
    for paths in ([f"{tmp_path}/near", f"{root}/b"], [f"{root}/b", f"{tmp_path}/near"]):
        status = main(["diff", *paths])
        assert (status, "w  3 of 3 elements differ" in capsys.readouterr().out) == (1, True)
    with pytest.raises(NotFoundError):
        read(f"{root}/none")
    save(f"file://{tmp_path}/c", {"w": torch.ones(1)})
    assert read(tmp_path / "c")["w"].tolist() == [1]
    with pytest.raises(StorageError, match="Protocol not known"):
        save("nosuch://x/y", {"w": torch.ones(1)})


def test_damage_is_found(remote):
    storage, root = remote
    succeed(save_on(states(1), f"{root}/a", storages=[storage] * 2))
    (generation,) = [n for n in storage.names_in(f"{root}/a") if n != "COMMIT"]
    file = f"{root}/a/{generation}/r00000.safetensors"
    content = bytearray(storage.size(file))
    storage.open(file).read_into(0, memoryview(content))
    with pytest.raises(CorruptError, match="ends 5 bytes before"):
        storage.open(file).read_into(5, memoryview(bytearray(len(content))))
    storage.put(file, bytes(content[:-1]) + b"\xff")
    into = [{"w": p, "n": 0} for p in sharded(torch.zeros(30, 4), 1)]
    (found,) = load_on(into, f"{root}/a", storages=[storage])
    assert isinstance(found, CorruptError)


def test_the_manager_on_a_store():
    root = f"memory://{uuid.uuid4().hex}/run"
    manager = CheckpointManager(root, keep_last=2)
    assert manager.latest() is None
    for step in range(4):
        manager.save(step, {"w": torch.full((2,), float(step))})
    assert manager.steps() == [2, 3]
    assert manager.restore(into={"w": torch.zeros(2)})["w"].tolist() == [3, 3]
    storage = FsspecStorage(root)
    # What a save that died has left.
    storage.put(f"{root}/step-00000009/g-0123456789abcdef/r00000.safetensors", b"half")
    assert manager.latest() == 3
    manager.save(4, {"w": torch.zeros(2)})
    assert storage.names_in(root) == ["step-00000003", "step-00000004"]
