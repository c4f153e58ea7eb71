"""A hostile checkpoint of DCP is refused with an error of ours: it changes and takes nothing."""

import copy
import io
import os
import pickle  # noqa: TID251 to write what is then read as data
import resource
import struct
import zipfile

import pytest
import torch
import vescale_ckpt as ckpt
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as names
from torch.distributed.checkpoint.filesystem import _StorageInfo
from vescale_ckpt._format.pickle_data import PickleRefusedError
from vescale_ckpt._format.torch_file import read_torch_file

DCP = "torch.distributed.checkpoint.metadata"
STATE = {"w": torch.arange(6.0), "v": {"a": torch.ones(2, 2), "n": [1, "x"]}}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("healthy") / "dcp"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(copy.deepcopy(STATE), checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def folder(healthy, tmp_path):
    place = tmp_path / "dcp"
    place.mkdir()
    for file in healthy.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


def edited(folder, edit):
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))


def refused(folder, words, kind=ckpt.CheckpointError):
    with pytest.raises(kind, match=words):
        ckpt.import_dcp(folder, folder.parent / "out")
    assert not (folder.parent / "out").exists()


def chunk(offset, size):
    return names.ChunkStorageMetadata(torch.Size(offset), torch.Size(size))


def info_of(metadata, name):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def in_entry(**fields):
    return lambda metadata: vars(metadata.state_dict_metadata["w"]).update(fields)


def in_chunk(**fields):
    return lambda metadata: vars(metadata.state_dict_metadata["w"].chunks[0]).update(fields)


def in_info(name="w", **fields):
    return lambda metadata: vars(info_of(metadata, name)).update(fields)


def in_metadata(**fields):
    return lambda metadata: vars(metadata).update(fields)


def in_path(path):
    return lambda metadata: metadata.planner_data.update(w=path)


def in_key(**fields):
    def edit(metadata):
        key = next(index for index in metadata.storage_data if index.fqn == "w")
        vars(key).update(fields)

    return edit


def same_item_twice(metadata):
    metadata.state_dict_metadata["x"] = metadata.state_dict_metadata["w"]
    index = names.MetadataIndex("x", (0,))
    metadata.storage_data[index] = info_of(metadata, "w")
    metadata.planner_data["x"] = ("x",)


def overlapping(metadata):
    in_key(offset=None)(metadata)
    in_entry(chunks=[chunk((0,), (4,)), chunk((2,), (2,))])(metadata)


def as_value(metadata):
    metadata.state_dict_metadata["w"] = names.BytesStorageMetadata()
    metadata.storage_data[names.MetadataIndex("w", (1,))] = info_of(metadata, "v.a")


class Other:
    pass


EDITS = {
    "a chunk twice": (in_entry(chunks=[chunk((0,), (3,))] * 2), "overlap"),
    "chunks that overlap": (overlapping, "overlap"),
    "a hole": (in_entry(chunks=[chunk((0,), (4,))]), "4 of 6 elements are stored"),
    "no chunks": (in_entry(chunks=[]), "0 of 6 elements are stored"),
    "chunk before the tensor": (in_chunk(offsets=torch.Size((-3,))), "no tensor has"),
    "chunk behind the tensor": (in_chunk(offsets=torch.Size((3,))), "outside of the shape"),
    "chunk of other dims": (in_chunk(offsets=torch.Size((0, 0))), "outside of the shape"),
    "chunk elsewhere": (in_chunk(offsets=torch.Size((6,)), sizes=torch.Size((0,))), "0 of 6"),
    "offsets are a list": (in_chunk(offsets=[0]), "no tensor has"),
    "offsets are missing": (in_chunk(offsets=None), "no tensor has"),
    "chunk is none": (in_entry(chunks=[None]), "a chunk of no known form"),
    "chunks are a dict": (in_entry(chunks={}), "its chunks are no list"),
    "too large": (in_entry(size=torch.Size((1 << 50,))), "elements are stored"),
    "beyond 64 bits": (in_entry(size=torch.Size((1 << 40, 1 << 40))), "no tensor has"),
    "100 dims": (in_entry(size=torch.Size([1] * 100)), "no tensor has"),
    "a claimed terabyte": (
        in_entry(size=torch.Size((1 << 38,)), chunks=[chunk((0,), (1 << 38,))]), "bytes for the",
    ),
    "size is text": (in_entry(size="6"), "no tensor has"),
    "no properties": (in_entry(properties=None), "it has no dtype"),
    "other dtype": (
        in_entry(properties=names.TensorProperties(torch.int32)), "is of torch.float32",
    ),
    "dtype is text": (in_entry(properties=names.TensorProperties("float32")), "it has no dtype"),
    "dtype without a form": (
        in_entry(properties=names.TensorProperties(torch.quint8)), "names torch.quint8",
    ),
    "negative offset": (in_info(offset=-1), "are no sizes"),
    "negative length": (in_info(length=-1), "are no sizes"),
    "offset is text": (in_info(offset="0"), "are no sizes"),
    "offset is a float": (in_info(offset=0.5), "are no sizes"),
    "no length": (in_info(length=None), "are no sizes"),
    "behind the file": (in_info("v.a", offset=1 << 40), "it was truncated"),
    "huge length": (in_info("v.a", length=1 << 50), "belongs to two items|it was truncated"),
    "amid another item": (in_info("v.a", offset=100), "belongs to two items"),
    "an item twice": (same_item_twice, "belongs to two items"),
    "a value in two items": (as_value, "stored 2 times"),
    "parent directory": (in_info(relative_path="../secret.distcp"), "no name of a file beside it"),
    "absolute path": (in_info(relative_path="/etc/passwd"), "no name of a file beside it"),
    "the folder": (in_info(relative_path="."), "no name of a file beside it"),
    "no file": (in_info(relative_path=""), "no name of a file beside it"),
    "file is a number": (in_info(relative_path=3), "no name of a file beside it"),
    "nul in a name": (in_info(relative_path="a\0b"), "no name of a file beside it"),
    "file that is not there": (in_info(relative_path="none"), "none"),
    "transforms": (in_info(transform_descriptors=["zstd"]), "stored with transforms"),
    "info is a number": (
        lambda m: m.storage_data.update(dict.fromkeys(m.storage_data, 3)), "in no known way",
    ),
    "index without name": (in_key(fqn=None), "an odd key"),
    "index of odd offset": (in_key(offset="x"), "no tensor has"),
    "storage_data is a list": (in_metadata(storage_data=[]), "storage_data is a list"),
    "no storage_data": (in_metadata(storage_data=None), "storage_data is a NoneType"),
    "nothing is stored": (in_metadata(storage_data={}), "nothing is stored for the chunk"),
    "entries are a list": (in_metadata(state_dict_metadata=[]), "state_dict_metadata is a list"),
    "entry is text": (in_metadata(state_dict_metadata={"w": "x"}), "an entry of no known form"),
    "key is a number": (in_metadata(state_dict_metadata={3: None}), "an entry of no known form"),
    "empty way": (in_path(()), "the way to 'w' is none"),
    "way is a list": (in_path(["w"]), "the way to 'w' is none"),
    "way of floats": (in_path((0.5,)), "the way to 'w' is none"),
    "bottomless way": (in_path((0,) * 100_000), "the way to 'w' is none"),
    "way through a leaf": (in_path(("v", "a", "b")), "not a container|lies where"),
    "way to another leaf": (in_path(("v", "a")), "lies where something else does"),
    "way to a negative entry": (in_path(("l", -1)), "a list has entries -1"),
    "way to a far entry": (in_path(("l", 1 << 40)), "a list has entries 1099511627776"),
    "key too large": (in_path(("x", 1 << 2000)), "a list has entries"),
    "of another class": (in_metadata(storage_meta=Other()), "which is not plain data"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "words"), EDITS.values(), ids=EDITS)
def test_edited_metadata(folder, edit, words):
    edited(folder, edit)
    refused(folder, words)


def test_without_an_edit_everything_comes_back(folder):
    edited(folder, lambda metadata: None)
    assert ckpt.import_dcp(folder, folder.parent / "out") == 2
    assert str(ckpt.read(folder.parent / "out")) == str(STATE)


@pytest.mark.parametrize("ways", [None, 3, {}, {3: 4, "other": 5}])
def test_planners_that_know_no_ways(folder, ways):
    edited(folder, in_metadata(planner_data=ways))
    assert ckpt.import_dcp(folder, folder.parent / "out") == 2
    assert set(ckpt.read(folder.parent / "out")) == {"w", "v.a", "v.n"}


def test_empty_chunks_of_ranks_that_hold_nothing(folder):
    edited(folder, lambda m: m.state_dict_metadata["w"].chunks.append(chunk((6,), (0,))))
    assert ckpt.import_dcp(folder, folder.parent / "out") == 2


def text(words):
    return b"X" + struct.pack("<I", len(words)) + words.encode()


def named(kind):
    return f"c{DCP}\n{kind}\n".encode()


RAW = {
    "empty": (b"", "truncated"),
    "no pickle": (b"\x93NUMPY", "no whole pickle"),
    "memo of gigabytes": (b"Nr\xff\xff\xff\x7f.", "it is no Metadata"),
    "text of gigabytes": (b"X\xff\xff\xff\x7f", "truncated"),
    "bytes of gigabytes": (b"\x96\xff\xff\xff\xff\xff\x00\x00\x00.", "opcode 0x96"),
    "attribute of a class": (
        named("MetadataIndex") + b"}" + text("fqn") + text("x") + b"sb.", "sets attributes",
    ),
    "attributes by a tuple": (
        named("MetadataIndex") + b"N}" + text("fqn") + text("x") + b"s\x86b.", "sets attributes",
    ),
    "a class that is called": (named("Metadata") + b"(tR.", "calls what is not to be called"),
    "an instance of a function": (b"ctorch.serialization\n_get_layout\n)\x81.", "has none"),
    "state twice": (named("Metadata") + b")\x81}b}b.", "sets attributes"),
    "a deep key": (b"}" + b")" + b"\x85" * 100_000 + b"Ns.", "a dict has a key of tuple"),
    "an integer key of many digits": (b"}\x8a\xff" + b"\x7f" * 255 + b"Ns.", "a key of int"),
    "a name of lists": (b"]]\x93.", "a name is no text"),
    "half a character": (b"X\x03\x00\x00\x00\xed\xa0\x80.", "no whole pickle"),
    "nothing on the stack": (b"\x85.", "too few entries"),
    "no mark": (b"t.", "IndexError"),
    "never put": (b"h\x07.", "KeyError"),
    "amid": (b"NN.", "amid a value"),
    "endless name": (b"c" + b"a" * 1000, "a name does not end"),
    "a list of itself as a key": (b"}]q\x00h\x00aNs.", "a key of list"),
    "an attribute of itself": (
        b"cbuiltins\ngetattr\n(" + named("_MEM_FORMAT_ENCODING") + b"]q\x00h\x00atR.",
        "asks for an attribute",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("content", "words"), RAW.values(), ids=RAW)
def test_metadata_that_is_none(folder, content, words):
    before = [{**vars(getattr(names, kind))} for kind in names.__all__]
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (folder / ".metadata").write_bytes(content)
    refused(folder, words, ckpt.FormatError)
    assert [{**vars(getattr(names, kind))} for kind in names.__all__] == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 200_000


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
@pytest.mark.parametrize("target", ["pipe", "/dev/zero", "."])
@pytest.mark.parametrize("which", [".metadata", "__0_0.distcp"])
def test_what_is_no_file_is_not_read(folder, which, target):
    (folder / which).unlink()
    if target == "pipe":
        os.mkfifo(folder / which)
    else:
        (folder / which).symlink_to(target)
    refused(folder, "not a regular file|truncated", ckpt.CorruptError)


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def rewritten(value, *, compress=zipfile.ZIP_STORED, **records):
    """A file of `torch.save` with other records."""
    old, new = zipfile.ZipFile(io.BytesIO(saved(value))), io.BytesIO()
    with zipfile.ZipFile(new, "w", compress) as made:
        for name in old.namelist():
            made.writestr(
                name, records.get(name.partition("/")[2].replace(".", "_"), old.read(name))
            )
    return new.getvalue()


def repeated(levels, wide):
    inner = "x"
    for _ in range(levels):
        inner = [inner] * wide
    return inner


def in_itself():
    value = []
    value += [value] * 1000
    return value


ITEMS = {
    "no archive": (b"\x80\x02N.", "no file of torch.save"),
    "empty": (b"", "no file of torch.save"),
    "compressed": (
        rewritten(torch.zeros(100_000), compress=zipfile.ZIP_DEFLATED), "is compressed",
    ),
    "stride 0": (saved(torch.zeros(1).expand(1 << 40)), "a tensor of"),
    "storage too small": (rewritten(torch.ones(4), **{"data/0": b"123"}), "are not there"),
    "big-endian": (rewritten(torch.ones(4), byteorder=b"big"), "big-endian"),
    "code": (rewritten(1, data_pkl=b"cos\nsystem\n(X\x04\0\0\0truetR."), "names os.system"),
    "repeated": (saved(repeated(40, 2)), "again and again"),
    "wide": (saved(repeated(4, 1000)), "again and again"),
    "in itself": (saved(in_itself()), "again and again"),
    "long texts": (saved(["x" * 100_000] * 1000), "again and again"),
    "a set": (saved({1}), "names __builtin__.set"),
    "sparse": (saved(torch.eye(2).to_sparse()), "not plain data"),
    "old form": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "no file of torch.save"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "words"), ITEMS.values(), ids=ITEMS)
def test_items_that_are_no_plain_values(content, words):
    with pytest.raises(PickleRefusedError, match=words):
        read_torch_file(content)


def test_a_refused_item_names_itself_and_its_file(folder):
    (data,) = folder.glob("*.distcp")
    file = bytearray(data.read_bytes())
    file[:4] = b"none"
    data.write_bytes(file)
    refused(folder, r"'.*' in .*distcp: not a tensor nor a plain value", ckpt.StateError)


KEPT = [
    torch.arange(12.0).view(3, 4)[:, 1:3],
    torch.arange(6).view(2, 3).t(),
    torch.ones(3, dtype=torch.uint16),
    torch.ones(4).to(torch.float8_e5m2),
    torch.full((2,), 1 + 2j).conj(),
    torch.full((2,), 1 + 2j).conj().imag,
    torch.tensor(3, dtype=torch.bool),
    torch.empty(0, 5),
    torch.ones(1, 3)[:, :1],
    torch.ones(3, dtype=torch.complex64),
    torch.nn.Parameter(torch.ones(2)),
]


@pytest.mark.parametrize("tensor", KEPT, ids=range(len(KEPT)))
def test_tensors_are_what_torch_reads(tensor):
    found = read_torch_file(saved(tensor))
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert str(found.resolve_conj()) == str(tensor.detach().resolve_conj())


def test_values_are_what_torch_reads():
    value = {"a": [1, -5, 70_000, 1 << 40, -(1 << 100), 0.5, None, True, "ä"], 3: ((), (1, {}))}
    assert read_torch_file(saved(value)) == value
    shared = torch.ones(3)
    found = read_torch_file(saved({"one": shared, "other": [shared, shared[1:]]}))
    assert str(found) == str({"one": shared, "other": [shared, shared[1:]]})


def test_storage_info_of_every_python_is_read(folder):
    edited(folder, lambda m: m.storage_data.update(
        {index: _StorageInfo(info.relative_path, info.offset, info.length)
         for index, info in m.storage_data.items()}))  # fmt: skip
    assert ckpt.import_dcp(folder, folder.parent / "out") == 2
