"""On a store without renames the commit object is last: a save there is complete or absent, too."""

import gc
import uuid

import pytest
import torch
import vescale_ckpt as ckpt
from emulated_ranks import assert_filled, load_on, save_on, sharded, succeed
from faulty_storage import AtCall, Failed, fails_from_then_on
from vescale_ckpt.__main__ import main

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
from vescale_ckpt._storage.fsspec_storage import FsspecStorage  # noqa: E402 only where it can work


@pytest.fixture(params=["memory", "local", "s3", "gs"])
def remote(request, tmp_path):
    """(storage, root): memory://, the local disk as if it had no renames, and servers of both."""
    if request.param == "memory":
        return FsspecStorage("memory://"), f"memory://{uuid.uuid4().hex}"
    if request.param == "local":
        return FsspecStorage("local", fsspec.filesystem("file")), str(tmp_path)
    root = f"{request.getfixturevalue(request.param)}/{uuid.uuid4().hex}"
    return FsspecStorage(root), root


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
        stopping = AtCall(storage, at, fails_from_then_on)
        outcomes = save_on(states(2), path, storages=[stopping, storage], overwrite=overwrite)
        into = [{"w": p, "n": 0} for p in sharded(torch.zeros(30, 4), 1)]
        (found,) = load_on(into, path, storages=[storage])
        if isinstance(found, Exception):
            assert isinstance(found, (ckpt.NotFoundError, ckpt.UncommittedError)), stopping.log
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


@pytest.mark.parametrize("remote", ["memory", "s3", "gs"], indirect=True)
def test_urls_everywhere(remote, tmp_path, capsys):
    root = f"{remote[1]}/run"
    ckpt.save(f"{root}/a", {"w": torch.ones(3)})
    with pytest.raises(ckpt.ExistsError):
        ckpt.save(f"{root}/a", {"w": torch.ones(3)})
    ckpt.save(f"{root}/a", {"w": torch.full((3,), 2.0)}, overwrite=True)
    ckpt.async_save(f"{root}/b", {"w": torch.full((3,), 3.0)}).wait()
    assert [ckpt.read(f"{root}/{n}")["w"][0].item() for n in "ab"] == [2, 3]
    assert ckpt.load(f"{root}/a", {"w": torch.zeros(3)})["w"].tolist() == [2, 2, 2]
    assert ckpt.verify(f"{root}/a").tensors == 1
    assert main(["ls", f"{root}/a"]) == 0
    assert main(["diff", f"{root}/a", f"{root}/b"]) == 1
    assert "w  3 of 3 elements differ" in capsys.readouterr().out
    # Two storages: each path is looked up in its own.
    ckpt.save(f"{tmp_path}/near", {"w": torch.zeros(3)})
    for paths in ([f"{tmp_path}/near", f"{root}/b"], [f"{root}/b", f"{tmp_path}/near"]):
        status = main(["diff", *paths])
        assert (status, "w  3 of 3 elements differ" in capsys.readouterr().out) == (1, True)
    with pytest.raises(ckpt.NotFoundError):
        ckpt.read(f"{root}/none")
    ckpt.save(f"file://{tmp_path}/c", {"w": torch.ones(1)})
    assert ckpt.read(tmp_path / "c")["w"].tolist() == [1]
    with pytest.raises(ckpt.StorageError, match="Protocol not known"):
        ckpt.save("nosuch://x/y", {"w": torch.ones(1)})


def test_damage_is_found(remote):
    storage, root = remote
    succeed(save_on(states(1), f"{root}/a", storages=[storage] * 2))
    (generation,) = [n for n in storage.names_in(f"{root}/a") if n != "COMMIT"]
    file = f"{root}/a/{generation}/r00000.safetensors"
    content = bytearray(storage.size(file))
    storage.open(file).read_into(0, memoryview(content))
    with pytest.raises(ckpt.CorruptError, match="ends 5 bytes before"):
        storage.open(file).read_into(5, memoryview(bytearray(len(content))))
    storage.put(file, bytes(content[:-1]) + b"\xff")
    into = [{"w": p, "n": 0} for p in sharded(torch.zeros(30, 4), 1)]
    (found,) = load_on(into, f"{root}/a", storages=[storage])
    assert isinstance(found, ckpt.CorruptError)


@pytest.mark.parametrize("remote", ["memory", "s3", "gs"], indirect=True)
def test_the_manager_on_a_store(remote):
    root = f"{remote[1]}/run"
    manager = ckpt.CheckpointManager(root, keep_last=2)
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


class BreakingStorage:
    """Writes of data fail after so many bytes."""

    renames = False

    def __init__(self, inner, after):
        self.inner, self.after = inner, after

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def create(self, path):
        return BreakingWriter(self.inner.create(path), self.after)


class BreakingWriter:
    def __init__(self, inner, after):
        self.inner, self.left = inner, after

    def write(self, data):
        self.left -= len(data)
        if self.left < 0:
            raise Failed("the connection is gone")
        self.inner.write(data)

    def finish(self):
        self.inner.finish()

    def abandon(self):
        self.inner.abandon()


# Of one part, and of several: clients send 50 MiB at a time.
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize(
    ("remote", "megabytes"),
    [("memory", 1), ("local", 1), ("s3", 1), ("gs", 1), ("s3", 60), ("gs", 60)],
    indirect=["remote"],
)
def test_a_write_that_breaks_leaves_nothing(remote, megabytes):
    storage, root = remote
    state = {"w": torch.zeros(megabytes << 18)}
    breaking = BreakingStorage(storage, (megabytes << 20) - 1)
    (error,) = save_on([state], f"{root}/a", storages=[breaking])
    assert "the connection is gone" in str(error)
    gc.collect()
    # Where there are directories, the one of the checkpoint is left, empty.
    assert not storage.exists(f"{root}/a") or storage.names_in(f"{root}/a") == []
    if root.startswith("s3"):
        uploads = storage._fs.call_s3("list_multipart_uploads", Bucket=root.split("/")[2])
        assert "Uploads" not in uploads
    if megabytes > 1:
        succeed(save_on([state], f"{root}/a", storages=[storage]))
        into = {"w": torch.ones(megabytes << 18)}
        succeed(load_on([into], f"{root}/a", storages=[storage]))
        assert not into["w"].any()


@pytest.mark.parametrize("remote", ["s3", "gs"], indirect=True)
def test_folders_of_a_console(remote):
    """An object called like a directory, as consoles and other tools make them."""
    storage, root = remote
    storage.put(f"{root}/run/a/", b"")
    assert storage.names_in(f"{root}/run") == ["a"]
    assert storage.names_in(f"{root}/run/a") == []
    ckpt.save(f"{root}/run/a", {"w": torch.ones(2)})
    assert ckpt.read(f"{root}/run/a")["w"].tolist() == [1, 1]
    assert len(storage.names_in(f"{root}/run/a")) == 2


@pytest.mark.parametrize("remote", ["s3", "gs"], indirect=True)
def test_what_others_write_is_seen(remote):
    """Two processes have a client each, and neither trusts what it has listed before."""
    storage, root = remote
    other = FsspecStorage(root, fsspec.filesystem(root.split(":")[0], skip_instance_cache=True))
    assert not storage.exists(f"{root}/x")
    assert not storage.exists(f"{root}")
    for content in (b"one", b"three"):
        other.put(f"{root}/x", content)
        assert storage.names_in(root) == ["x"]
        assert storage.size(f"{root}/x") == len(content)
    other.remove_file(f"{root}/x")
    assert not storage.exists(f"{root}/x")


def test_an_outage_is_no_absence():
    """A save must not replace what it cannot see: fsspec's own `exists` says no to every error."""
    filesystem = fsspec.filesystem("memory", skip_instance_cache=True)
    root = f"memory://{uuid.uuid4().hex}/a"
    storage = FsspecStorage(root, filesystem)
    succeed(save_on([{"w": torch.ones(2)}], root, storages=[storage]))

    def refused(path, **options):
        raise PermissionError("access denied")

    filesystem.info = refused
    for look in (storage.exists, storage.is_directory):
        with pytest.raises(ckpt.StorageError, match=r"cannot look at .*access denied"):
            look(root)
    (error,) = save_on([{"w": torch.zeros(2)}], root, storages=[storage])
    assert "access denied" in str(error)
    assert ckpt.read(root)["w"].tolist() == [1, 1]


@pytest.mark.parametrize("remote", ["s3", "gs"], indirect=True)
def test_a_bucket_that_is_not_there(remote):
    _, root = remote
    missing = f"{root.split('://')[0]}://no-such-bucket-here/run/a"
    with pytest.raises(ckpt.NotFoundError, match="there is no checkpoint at"):
        ckpt.read(missing)
    with pytest.raises(ckpt.StorageError, match="no-such-bucket-here"):
        ckpt.save(missing, {"w": torch.ones(2)})
