"""What safetensors itself refuses is refused here, case by case; what is valid is read alike."""

import importlib
import json
import os
import random
import struct
import time

import pytest
import torch
import vescale_ckpt as ckpt
from mutations import mutated
from vescale_ckpt._untrusted import DTYPES, MOST_DIMS, open_regular, parse_index, read_header

library = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
SafetensorError = importlib.import_module("safetensors").SafetensorError


def blob(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(dtype="F32", shape=(4,), span=(0, 16), **more):
    return {"w": {"dtype": dtype, "shape": [*shape], "data_offsets": [*span], **more}}


def raw(**fields):
    given = {"dtype": '"F32"', "shape": "[4]", "data_offsets": "[0,16]", **fields}
    return ('{"w":{' + ",".join(f'"{key}":{text}' for key, text in given.items()) + "}}").encode()


ENTRY = b'{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
D = bytes(range(16))

# Valid files: both read them.
VALID = {
    "plain": blob(one(), D),
    "no tensors": blob({}),
    "spaces behind": blob(json.dumps(one()).encode() + b"   ", D),
    "spaces within": blob(json.dumps(one(), indent=2).encode(), D),
    "metadata": blob({"__metadata__": {"format": "pt", "[{": "}]"}, **one()}, D),
    "metadata last": blob({**one(), "__metadata__": {}}, D),
    "escapes": blob(b'{"\\u00e4\\"\\\\/\\ud83d\\ude00":' + ENTRY + b"}", D[:4]),
    "other letters": blob('{"ä":'.encode() + ENTRY + b"}", D[:4]),
    "scalar": blob(one(shape=(), span=(0, 4)), D[:4]),
    "empty": blob(one(shape=(0, 3), span=(0, 0))),
    "empty beside": blob(
        {**one(), "e": {"dtype": "I8", "shape": [0], "data_offsets": [16, 16]}}, D
    ),
    "order of keys": blob(b'{"w":{"data_offsets":[0,4],"shape":[4],"dtype":"U8"}}', D[:4]),
    "dims as many as may be": blob(one(shape=(1,) * MOST_DIMS, span=(0, 4)), D[:4]),
    **{
        name: blob(one(name, (1,), (0, dtype.itemsize)), D[: dtype.itemsize])
        for name, dtype in DTYPES.items()
    },
}

# Refused by both.
REFUSED = {
    "empty file": b"",
    "short length": b"\x01\0\0\0",
    "header behind the end": blob(one(), D, length=10_000),
    "header of 2^63": blob(one(), D, length=1 << 63),
    "header of 100 MB and more": blob(b"{}", b" " * 100, length=100_000_001),
    "no header": blob(b""),
    "one byte": blob(b"{"),
    "not UTF-8": blob(b'{"\xff":1}'),
    "BOM": blob(b"\xef\xbb\xbf{}"),
    "a list": blob([]),
    "a number": blob(b"7 "),
    "null": blob(b"null"),
    "cut off": blob(json.dumps(one()).encode()[:-1], D),
    "more behind": blob(json.dumps(one()).encode() + b"{}", D),
    "comma at the end": blob(b'{"w":' + ENTRY + b",}", D[:4]),
    "no comma": blob(b'{"w":' + ENTRY + b'"v":' + ENTRY + b"}", D[:4]),
    "no colon": blob(b'{"w"' + ENTRY + b"}", D[:4]),
    "key without quotes": blob(b"{w:" + ENTRY + b"}", D[:4]),
    "single quotes": blob(b"{'w':" + ENTRY + b"}", D[:4]),
    "line in a key": blob(b'{"a\nb":' + ENTRY + b"}", D[:4]),
    "half a character": blob(b'{"\\ud800":' + ENTRY + b"}", D[:4]),
    "odd escape": blob(b'{"\\x41":' + ENTRY + b"}", D[:4]),
    "entry is a list": blob(b'{"w":[]}'),
    "entry is null": blob(b'{"w":null}'),
    "deep lists": blob(b'{"w":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "deep objects": blob(b'{"w":' * 20_000 + b"1" + b"}" * 20_000),
    "dtype missing": blob(b'{"w":{"shape":[4],"data_offsets":[0,4]}}', D[:4]),
    "shape missing": blob(b'{"w":{"dtype":"U8","data_offsets":[0,4]}}', D[:4]),
    "offsets missing": blob(b'{"w":{"dtype":"U8","shape":[4]}}', D[:4]),
    "dtype twice": blob(
        b'{"w":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', D[:4]
    ),
    "shape twice": blob(
        b'{"w":{"dtype":"U8","shape":[4],"shape":[4],"data_offsets":[0,4]}}', D[:4]
    ),
    "unknown dtype": blob(one("OBJ"), D),
    "dtype in small letters": blob(one("f32"), D),
    "dtype is a number": blob(raw(dtype="3"), D),
    "dtype is null": blob(raw(dtype="null"), D),
    "fraction": blob(raw(shape="[4.9]"), D),
    "whole fraction": blob(raw(shape="[4.0]"), D),
    "exponent": blob(raw(shape="[4e0]"), D),
    "zero in front": blob(raw(shape="[04]"), D),
    "plus": blob(raw(shape="[+4]"), D),
    "text": blob(raw(shape='["4"]'), D),
    "bool": blob(raw(shape="[true]", data_offsets="[0,4]"), D[:4]),
    "null size": blob(raw(shape="[null]"), D),
    "NaN": blob(raw(shape="[NaN]"), D),
    "negative": blob(raw(shape="[-4]"), D),
    "shape is a number": blob(raw(shape="4"), D),
    "nested shape": blob(raw(shape="[[4]]"), D),
    "one offset": blob(raw(data_offsets="[16]"), D),
    "three offsets": blob(raw(data_offsets="[0,16,16]"), D),
    "offsets turned": blob(raw(data_offsets="[16,0]"), D),
    "negative offset": blob(raw(data_offsets="[-1,15]"), D),
    "offsets of 2^63": blob(raw(shape="[0]", data_offsets=f"[{1 << 63},{1 << 63}]")),
    "offsets of 2^64": blob(raw(data_offsets=f"[{1 << 64},{(1 << 64) + 16}]"), D),
    "digits without end": blob(raw(shape="[" + "9" * 5000 + "]"), D),
    "product of 2^64": blob(raw(shape=f"[{1 << 32},{1 << 32}]"), D),
    "zero behind a large product": blob(
        raw(shape=f"[{1 << 61},{1 << 61},0]", data_offsets="[0,0]")
    ),
    "too few bytes": blob(one(), D[:15]),
    "too many bytes": blob(one(), D + b"x"),
    "bytes for another shape": blob(one(shape=(5,)), D),
    "hole": blob(one("U8", (4,), (1, 5)), D[:5]),
    "hole between": blob({**one("U8", (4,), (0, 4)), "v": one("U8", (4,), (5, 9))["w"]}, D[:9]),
    "overlap": blob({**one("U8", (4,), (0, 4)), "v": one("U8", (4,), (2, 6))["w"]}, D[:6]),
    "one span for two": blob({**one("U8", (4,), (0, 4)), "v": one("U8", (4,), (0, 4))["w"]}, D[:4]),
    "metadata is a list": blob({"__metadata__": [], **one()}, D),
    "metadata of numbers": blob({"__metadata__": {"a": 1}, **one()}, D),
    "metadata of objects": blob({"__metadata__": {"a": {}}, **one()}, D),
}

# Refused here, though the library reads them, or torch could not hold them.
STRICTER = {
    "spaces before": blob(b" " + json.dumps(one()).encode(), D),
    "a name twice": blob(b'{"w":' + ENTRY + b',"w":' + ENTRY + b"}", D[:4]),
    "a name of metadata twice": blob(
        b'{"__metadata__":{"a":"x","a":"y"},"w":' + ENTRY + b"}", D[:4]
    ),
    "something else in an entry": blob(one(note=1), D),
    "metadata is null": blob({"__metadata__": None, **one()}, D),
    "more dims than torch has": blob(one(shape=(1,) * 65, span=(0, 4)), D[:4]),
    "zero before a large product": blob(
        raw(shape=f"[0,{1 << 61},{1 << 61}]", data_offsets="[0,0]")
    ),
    "many large dims": blob({"w": one("U8", (1 << 61,) * 40_000, (0, 4))["w"]}, D[:4]),
    "half bytes": blob(one("F4", (8,), (0, 4)), D[:4]),
}


def ours(content, path):
    path.write_bytes(content)
    with open_regular(path) as file:
        header, begin = read_header(file)
    data = content[begin:]
    return {
        name: torch.frombuffer(bytearray(data[a:b]) or bytearray(1), dtype=torch.uint8)[: b - a]
        .view(DTYPES[kind])
        .view(shape)
        for name, (kind, shape, a, b) in header.items()
    }


@pytest.mark.parametrize("content", VALID.values(), ids=VALID)
def test_valid_files(tmp_path, content):
    theirs, found = library.load(content), ours(content, tmp_path / "x")
    assert found.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert str(found[name]) == str(tensor)


@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED)
def test_what_the_library_refuses(tmp_path, content):
    with pytest.raises(SafetensorError):
        library.load(content)
    with pytest.raises(ValueError, match=r"\w"):
        ours(content, tmp_path / "x")
    with pytest.raises((ckpt.FormatError, ckpt.CorruptError)):
        ckpt.import_safetensors(tmp_path / "x", tmp_path / "out")
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("content", STRICTER.values(), ids=STRICTER)
def test_what_is_refused_here_alone(tmp_path, content):
    with pytest.raises(ValueError, match=r"\w"):
        ours(content, tmp_path / "x")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b'{"w":{"dtype":"U8","shape":[' + b"9223372036854775807," * 200_000 + b"1],", "of sizes"),
        (b'{"w":{"dtype":"U8","shape":[' + b"[" * 4_000_000, "of sizes"),
        (b'{"__metadata__":{' + b"[{" * 2_000_000, "a string is due"),
        (b'{"w":' + b'{"a":' * 1_000_000, "nothing that a tensor has"),
        (b'{"' + b"\\" * 3_999_999, "not the JSON"),
        (b"{" + b" " * 4_000_000, "a string is due"),
        (b'{"w":{"dtype":"' + b"A" * 4_000_000, "dtype must be a name"),
    ],
)  # fmt: skip
def test_work_stays_within_the_size_of_a_header(tmp_path, header, words):
    path = tmp_path / "x"
    path.write_bytes(blob(header, D))
    began = time.process_time()
    with open_regular(path) as file, pytest.raises(ValueError, match=words):
        read_header(file)
    # Of megabytes; what is quadratic in them takes minutes.
    assert time.process_time() - began < 30


def fitting(content, dice):
    """Changed, and mostly with the length that fits: else its check would be the only one tried."""
    made = mutated(content, dice)
    end = made.rfind(b"}") + 1
    if dice.random() < 0.7 and end > 8:
        return struct.pack("<Q", end - 8) + made[8:]
    return made


@pytest.mark.parametrize("rounds", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_files_with_changes_are_read_as_the_library_does_or_refused(tmp_path, rounds):
    dice = random.Random(49)
    corpus = [*VALID.values(), *REFUSED.values()]
    corpus = [one for one in corpus if len(one) < 2000]
    read = 0
    for _ in range(rounds):
        content = fitting(dice.choice(corpus), dice)
        try:
            found = ours(content, tmp_path / "x")
        except ValueError:
            continue
        theirs = library.load(content)
        assert str(found) == str({name: theirs[name] for name in found}), content
        assert found.keys() == theirs.keys()
        read += 1
    assert read > rounds // 100


INDICES = {
    "not JSON": (b"\x80\x04", "codec"),
    "BOM": (b'\xef\xbb\xbf{"weight_map":{"w":"a"}}', "BOM"),
    "a list": (b"[]", "'weight_map' must be an object"),
    "no map": (b"{}", "'weight_map' must be an object"),
    "empty map": (b'{"weight_map":{}}', "that names tensors"),
    "map is a list": (b'{"weight_map":["w"]}', "'weight_map' must be an object"),
    "a name twice": (b'{"weight_map":{"w":"a","w":"b"}}', "appears twice"),
    "a map twice": (b'{"weight_map":{"w":"a"},"weight_map":{"w":"b"}}', "appears twice"),
    "deep": (b'{"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "NaN": (b'{"metadata":NaN,"weight_map":{"w":"a"}}', "not JSON"),
    "digits": (b'{"metadata":' + b"9" * 5000 + b',"weight_map":{"w":"a"}}', "digits"),
    "half a character": (b'{"weight_map":{"\\ud800":"a"}}', "surrogates"),
    **{
        f"file {file!r:.20}": (json.dumps({"weight_map": {"w": file}}).encode(), "no name of a")
        for file in ("../x", "/etc/passwd", "a/b", "..\\x", "C:x", "", ".", "..", "a\0b", "a\nb",
                     3, None, ["a"], "x" * 300)
    },
}  # fmt: skip


@pytest.mark.parametrize(("content", "words"), INDICES.values(), ids=INDICES)
def test_indices_that_are_none(content, words):
    with pytest.raises(ValueError, match=words):
        parse_index(content)
