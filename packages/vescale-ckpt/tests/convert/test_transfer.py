"""What is exported to other formats, or imported, is the same bytes; what is hostile is refused."""

import json
import os
import struct

import pytest
import torch
import vescale_ckpt as ckpt
from edited_checkpoint import damage
from emulated_ranks import bits, save_on, sharded, succeed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata
from vescale_ckpt._convert import dcp_import

EVERY = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float8_e5m2,
         torch.float64, torch.int16]  # fmt: skip


def model():
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2, (960,), dtype=torch.uint8, generator=generator)
    tensors = {f"layers.{i}.weight": raw.view(dtype) for i, dtype in enumerate(EVERY)}
    return {**tensors, "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4)}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]).equal(bits(tensor)), name


@pytest.mark.parametrize("shard_bytes", [1 << 30, 2000])
def test_to_hugging_face_and_back(tmp_path, path, shard_bytes):
    ckpt.save(path, {"model": model(), "step": 3, "optim": {0: torch.ones(2)}})
    done = ckpt.export_safetensors(path, tmp_path / "hf", at="model", shard_bytes=shard_bytes)
    assert done.tensors == len(model())
    assert sorted(os.listdir(tmp_path / "hf")) == sorted(done.files)
    library = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    opened = {}
    for file in done.files:
        if file.endswith(".safetensors"):
            opened |= library.load_file(tmp_path / "hf" / file)
    assert_same(opened, model())
    if len(done.files) > 1:
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == model().keys()
        assert index["metadata"]["total_size"] == done.nbytes
        assert max(os.path.getsize(tmp_path / "hf" / f) for f in done.files) < 4000
    assert ckpt.import_safetensors(tmp_path / "hf", tmp_path / "back", under="model") == len(
        model()
    )
    assert_same(ckpt.read(tmp_path / "back")["model"], model())


def test_shards_of_ranks_become_whole(tmp_path, path):
    whole = torch.randn(31, 7)
    succeed(save_on([{"m": {"w": p}} for p in sharded(whole, 3, 1)], path))
    ckpt.export_safetensors(path, tmp_path / "hf")
    ckpt.import_safetensors(tmp_path / "hf" / "model.safetensors", tmp_path / "back")
    assert ckpt.read(tmp_path / "back")["m.w"].equal(whole)


def test_what_cannot_be_exported(tmp_path, path):
    ckpt.save(path, {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1), "c": torch.ones(1) * 1j})
    for options, words in (
        ({"only": ["a.b"]}, "'a/b' and 'a.b' would both be called 'a.b'"),
        ({"only": "c"}, "safetensors has no complex64"),
        ({"at": "model"}, "holds no tensor below 'model'"),
    ):
        with pytest.raises(ckpt.StateError, match=words):
            ckpt.export_safetensors(path, tmp_path / "hf", **options)
        assert sorted(os.listdir(tmp_path)) == ["step-1"]
    (tmp_path / "hf").mkdir()
    with pytest.raises(ckpt.ExistsError):
        ckpt.export_safetensors(path, tmp_path / "hf", at="a")


def test_a_damaged_checkpoint_is_not_exported(tmp_path, path):
    ckpt.save(path, {"w": torch.ones(1000)})
    damage(path)
    with pytest.raises(ckpt.CorruptError, match="do not match their checksum"):
        ckpt.export_safetensors(path, tmp_path / "hf")
    assert os.listdir(tmp_path) == ["step-1"]


def blob(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes):
    return {"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **changes}}


HOSTILE = {
    "empty": (b"", ckpt.CorruptError, "truncated"),
    "huge header": (struct.pack("<Q", 1 << 60) + b"{}", ckpt.CorruptError, "a header of"),
    "not JSON": (blob(b"\x80\x04"), ckpt.FormatError, "not begin with an object"),
    "list": (blob([]), ckpt.FormatError, "not begin with an object"),
    "twice": (blob(b'{"a":1,"a":2}'), ckpt.FormatError, "an object is due at"),
    "short data": (blob(entry(), b"123"), ckpt.CorruptError, "3 bytes of data, but 4"),
    "hole": (blob(entry(data_offsets=[1, 5]), b"12345"), ckpt.FormatError, "starts at byte 1"),
    "left over": (blob(entry(), b"12345"), ckpt.CorruptError, "5 bytes of data"),
    "dtype": (blob(entry(dtype="OBJ"), b"1234"), ckpt.FormatError, "unknown dtype"),
    "shape": (blob(entry(shape=[5]), b"1234"), ckpt.FormatError, "4 bytes for shape"),
    "negative": (blob(entry(shape=[-4]), b"1234"), ckpt.FormatError, "lists of sizes"),
    "overflow": (blob(entry(shape=[1 << 40, 1 << 40]), b"1234"), ckpt.FormatError, "too large"),
}


@pytest.mark.parametrize(("content", "kind", "words"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_safetensors(tmp_path, content, kind, words):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(kind, match=words):
        ckpt.import_safetensors(tmp_path / "x.safetensors", tmp_path / "out")
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_an_index_that_leads_elsewhere(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    for file in ("../secret.safetensors", "/etc/passwd", 3, "none.safetensors"):
        index = {"weight_map": {"w": file}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ckpt.FormatError, match=r"no (name of a )?file"):
            ckpt.import_safetensors(folder, tmp_path / "out")
    with pytest.raises(ckpt.NotFoundError):
        ckpt.import_safetensors(tmp_path / "nothing", tmp_path / "out")


def test_unaligned_files_of_other_writers(tmp_path):
    tensors = {"w": torch.arange(5.0), "b": torch.arange(3, dtype=torch.uint8)}
    header = {
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [20, 23]},
        "w": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]},
    }
    data = tensors["w"].numpy().tobytes() + bytes([0, 1, 2])
    # Where the bytes of "w" begin hangs on the header, whose end is anywhere.
    for spaces in range(4):
        text = json.dumps(header).encode() + b" " * spaces
        (tmp_path / "x.safetensors").write_bytes(blob(text, data))
        ckpt.import_safetensors(tmp_path / "x.safetensors", tmp_path / f"out-{spaces}")
        assert_same(ckpt.read(tmp_path / f"out-{spaces}"), tensors)


def test_from_dcp(tmp_path):

    state = {
        "model": {"w": torch.randn(5, 3), "b": torch.zeros(2, dtype=torch.bfloat16)},
        "optim": {"groups": [{"lr": 0.1}, {"lr": 0.2}], "m": [torch.ones(2), torch.zeros(1)]},
        "step": 3,
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert ckpt.import_dcp(tmp_path / "dcp", tmp_path / "ours") == 4
    found = ckpt.read(tmp_path / "ours")
    assert_same(found["model"], state["model"])
    assert found["optim"]["groups"] == state["optim"]["groups"]
    assert [t.tolist() for t in found["optim"]["m"]] == [[1, 1], [0]]
    assert found["step"] == 3


def test_lists_of_dcp_keep_their_places(tmp_path):
    one, two = torch.ones(2), torch.zeros(3)
    state = {
        "groups": [{"m": one}, {}, {"m": two}],
        "first": [{}, one],
        "deep": [[{}, one], {"a": {}, "b": [{}, {}, two]}],
        "values": [[], [1], {}, 2, one],
        "indices": (0, {5: "x"}),
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(dict(state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    ckpt.import_dcp(tmp_path / "dcp", tmp_path / "ours")
    found = ckpt.read(tmp_path / "ours")
    del state["deep"][1]["a"]  # of which there is no trace
    assert list(found) == list(state)
    assert str(found) == str(state)


HOSTILE_PATHS = [
    ({"w": ("list", 1 << 40), "v": ("v",)}, "a list has entries 1099511627776 to"),
    ({"w": ("list", -1), "v": ("v",)}, "a list has entries -1 to -1"),
    ({"w": ("v", "w"), "v": ("v",)}, "lies below a value that is not a container"),
    ({"w": ("v",), "v": ("v",)}, "lies where something else does"),
    ({"w": ("v",), "v": ("v", "w")}, "lies where something else does"),
    ({"w": ("a", 900_000), "v": ("b", 900_000)}, "a list has entries 900000 to 900000"),
]


@pytest.mark.parametrize(("paths", "words"), HOSTILE_PATHS)
def test_hostile_paths_of_dcp(paths, words):
    with pytest.raises(ckpt.FormatError, match=words):
        dcp_import._nested({"v": 1, "w": 2}, paths)


def test_a_dict_that_dcp_stored_as_a_value_stays_one():
    found = dcp_import._nested({"x": {0: "a", 5: "b"}, "y": 1}, {"x": ("x",), "y": ("l", 0)})
    assert found == {"x": {0: "a", 5: "b"}, "l": [1]}


def test_a_dcp_checkpoint_runs_nothing(tmp_path):

    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": torch.ones(2), "v": "x"}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    proof = tmp_path / "executed"
    bomb = f"cos\nsystem\n(S'touch {proof}'\ntR.".encode()
    healthy = (tmp_path / "dcp" / ".metadata").read_bytes()
    (tmp_path / "dcp" / ".metadata").write_bytes(bomb)
    with pytest.raises(ckpt.FormatError, match=r"names os.system, which is not plain data"):
        ckpt.import_dcp(tmp_path / "dcp", tmp_path / "ours")
    (tmp_path / "dcp" / ".metadata").write_bytes(healthy)
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    data.write_bytes(bomb + data.read_bytes()[len(bomb) :])
    with pytest.raises(ckpt.StateError, match="not a tensor nor a plain value"):
        ckpt.import_dcp(tmp_path / "dcp", tmp_path / "ours")
    assert not proof.exists()
    assert sorted(os.listdir(tmp_path)) == ["dcp"]


def test_dcp_metadata_may_name_members_of_an_enum_as_python_311_does(tmp_path, monkeypatch):

    def as_attribute(member, protocol):
        return getattr, (type(member), member.name)

    monkeypatch.setattr(metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", as_attribute)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": torch.arange(3.0)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert b"getattr" in (tmp_path / "dcp" / ".metadata").read_bytes()
    assert ckpt.import_dcp(tmp_path / "dcp", tmp_path / "ours") == 1
    assert torch.equal(ckpt.read(tmp_path / "ours")["w"], torch.arange(3.0))


def text(words):
    return b"X" + struct.pack("<I", len(words)) + words.encode()


@pytest.mark.parametrize("owner", ["torch.Size", "_MEM_FORMAT_ENCODING"])
def test_dcp_metadata_may_ask_for_no_other_attribute(tmp_path, owner):
    module = "torch" if owner == "torch.Size" else "torch.distributed.checkpoint.metadata"
    name = owner.rpartition(".")[2]
    asked = f"cbuiltins\ngetattr\n(c{module}\n{name}\n".encode() + text("__subclasses__") + b"tR."
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(asked)
    with pytest.raises(ckpt.FormatError, match="asks for an attribute '__subclasses__'"):
        ckpt.import_dcp(tmp_path / "dcp", tmp_path / "ours")
