"""Hostile checkpoints, whose digests fit: each is refused with a named error, quickly and small."""

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from edited_checkpoint import generation_of, manifest_of, rewrite_manifest
from vescale_ckpt import CheckpointError, CorruptError, FormatError, read, save, verify
from vescale_ckpt._format.checksums import CRC32


def set_in(manifest, path, value):
    """Set manifest[path[0]][path[1]]... to value."""
    *before, last = path
    for key in before:
        manifest = manifest[key]
    manifest[last] = value


CHUNK = ("tensors", "w", "chunks", 0)

# What is changed -> the error says.
EDITS = {
    "future version": (("version",), 3, "format version 3"),
    "version as a bool": (("version",), True, "format version True"),
    "unknown checksum": (("checksum",), "md5", "unknown checksum 'md5'"),
    "checksum missing": (("checksum",), None, "unknown checksum None"),
    "checksum is a list": (("checksum",), ["crc32"], "unknown checksum"),
    "other format": (("format",), "zip", "not a vescale-ckpt file"),
    "absolute file": ((*CHUNK, "file"), "/etc/passwd", "is not listed"),
    "parent directory": ((*CHUNK, "file"), "../../secret.safetensors", "is not listed"),
    "file is a number": ((*CHUNK, "file"), 3, "must be str"),
    "negative start": ((*CHUNK, "start"), -8, "out of range"),
    "start beyond the end": ((*CHUNK, "start"), 1 << 40, "where .* is due"),
    "huge bytes": ((*CHUNK, "bytes"), 1 << 61, "has 2305843009213693952 bytes"),
    "bytes as a float": ((*CHUNK, "bytes"), 48.0, "must be int"),
    "too few checksums": ((*CHUNK, "checksums"), "", "8 lower-case hexadecimal digits"),
    "checksum not hexadecimal": ((*CHUNK, "checksums"), "zzzzzzzz", "hexadecimal"),
    "chunk outside": ((*CHUNK, "offset"), [1, 0], "outside the shape"),
    "chunk of other dims": ((*CHUNK, "offset"), [0], "another number of dims"),
    "empty chunk": ((*CHUNK, "shape"), [0, 4], "is empty"),
    "no chunks": (("tensors", "w", "chunks"), [], "do not cover"),
    "chunks not a list": (("tensors", "w", "chunks"), {}, "must be list"),
    "huge shape": (("tensors", "w", "shape"), [1 << 40, 1 << 40], "too large to be real"),
    "shape beyond 64 bits": (("tensors", "w", "shape"), [10**30, 1], "non-negative integers"),
    "many dims": (("tensors", "w", "shape"), [1] * 5000, "too large to be real"),
    "negative dim": (("tensors", "w", "shape"), [-3, -4], "non-negative integers"),
    "bool dim": (("tensors", "w", "shape"), [True, 4], "non-negative integers"),
    "unknown dtype": (("tensors", "w", "dtype"), "object", "unknown dtype"),
    "zero block": (("block_bytes",), 0, "block_bytes"),
    "odd block": (("block_bytes",), 100_001, "block_bytes"),
    "huge header": (("files", "r00000.safetensors", "header_bytes"), 1 << 50, "makes no sense"),
    "files missing": (("files",), {}, "is not listed"),
    "files is a list": (("files",), [], "must be dict"),
    "provenance is text": (("provenance",), "me", "must be dict"),
    "provenance is deep": (("provenance", "writer"), [[1]], "plain values only"),
    "state missing": (("state",), None, "'state' must be a dict node"),
    "state is a list": (("state",), [], "'state' must be a dict node"),
    "tensor not in the state": (("state",), {"dict": []}, "nowhere in the state"),
    "tensor used twice": (
        ("state",), {"dict": [["w", {"tensor": "w"}], ["v", {"tensor": "w"}]]}, "not a node",
    ),
    "unknown tensor": (("state",), {"dict": [["w", {"tensor": "passwd"}]]}, "not a node"),
    "unknown node": (("state", "dict", 1, 1), {"pickle": "gASV..."}, "not a node"),
    "node of two keys": (("state", "dict", 1, 1), {"int": "0x1", "float": "0" * 16}, "one key"),
    "node of no key": (("state", "dict", 1, 1), {}, "one key"),
    "key twice": (("state", "dict", 1, 0), "w", "a key twice"),
    "key is a list": (("state", "dict", 1, 0), [], "no pair"),
    "key is a bool": (("state", "dict", 1, 0), True, "no pair"),
    "pair of three": (("state", "dict", 1), ["n", 1, 2], "no pair"),
    "endless integer": (("state", "dict", 1, 1), {"int": "0x" + "f" * 9000}, "not a node"),
    "float of wrong length": (("state", "dict", 1, 1), {"float": "ff"}, "not a node"),
    "tuple of a string": (("state", "dict", 1, 1), {"tuple": "ab"}, "not a node"),
}  # fmt: skip


@pytest.fixture
def saved(path, monkeypatch):
    # Whatever is installed: the edits below are of a checkpoint with CRC-32.
    monkeypatch.setattr("vescale_ckpt._format.checksums.fastest", lambda: CRC32)
    save(path, {"w": torch.zeros(3, 4), "n": 1})
    return path


def assert_refused(saved, words, kind=FormatError):
    for attempt in (read, verify):
        with pytest.raises(kind, match=words):
            attempt(saved)


@pytest.mark.parametrize(("where", "value", "words"), EDITS.values(), ids=EDITS)
def test_edited_manifest(saved, where, value, words):
    manifest = manifest_of(saved)
    set_in(manifest, where, value)
    rewrite_manifest(saved, manifest)
    assert_refused(saved, words)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x.safetensors", "a/b.safetensors", "..", ".hidden.safetensors",
             "nul\0.safetensors", "x.safetensors\n", "C:.safetensors", "x" * 300 + ".safetensors"],
)  # fmt: skip
def test_file_names_that_leave_the_directory(saved, name):
    manifest = manifest_of(saved)
    manifest["files"][name] = manifest["files"].pop("r00000.safetensors")
    manifest["tensors"]["w"]["chunks"][0]["file"] = name
    rewrite_manifest(saved, manifest)
    assert_refused(saved, "not a legal file name")


def deep(opening, closing, n):
    return (opening * n + closing * n).encode()


RAW = {
    "empty": (b"", "not the JSON"),
    "not JSON": (b"\x80\x04\x95", "not the JSON"),
    "pickle": (b"cposix\nsystem\n(S'true'\ntR.", "not the JSON"),
    "a number": (b"7", "not a vescale-ckpt file"),
    "nan": (b'{"format":"vescale-ckpt","version":NaN}', "NaN is not JSON"),
    "duplicate key": (b'{"format":"vescale-ckpt","version":1,"version":1}', "appears twice"),
    "bottomless lists": (deep("[", "]", 200_000), "nested too deeply"),
    "bottomless dicts": (deep('{"a":', "}", 100_000), "nested too deeply"),
    "integer of a million digits": (b"9" * 1_000_000, "not the JSON"),
}


@pytest.mark.parametrize(("content", "words"), RAW.values(), ids=RAW)
def test_manifest_that_is_no_manifest(saved, content, words):
    if content:
        rewrite_manifest(saved, content)
        assert_refused(saved, words)
    else:
        (generation_of(saved) / "manifest.json").write_bytes(b"")
        assert_refused(saved, "digest", CorruptError)


def test_state_nested_below_the_limit_of_the_parser(saved):
    manifest, node = manifest_of(saved), 1
    for _ in range(70):
        node = [node]
    manifest["state"]["dict"][1][1] = node
    rewrite_manifest(saved, manifest)
    assert_refused(saved, "nested deeper than 64")


def test_overlapping_chunks_and_bytes_of_two_tensors(saved):
    manifest = manifest_of(saved)
    chunk = manifest["tensors"]["w"]["chunks"][0]
    manifest["tensors"]["w"]["chunks"] = [chunk, dict(chunk)]
    rewrite_manifest(saved, manifest)
    assert_refused(saved, "overlap")
    manifest["tensors"]["w"]["chunks"] = [chunk]
    manifest["tensors"]["v"] = manifest["tensors"]["w"]
    manifest["state"]["dict"].append(["v", {"tensor": "v"}])
    rewrite_manifest(saved, manifest)
    assert_refused(saved, "a chunk starts at byte")


def test_bytes_that_belong_to_no_tensor(saved):
    manifest = manifest_of(saved)
    manifest["files"]["r00000.safetensors"]["bytes"] += 4
    rewrite_manifest(saved, manifest)
    assert_refused(saved, "belong to no tensor")


def test_a_claimed_terabyte_allocates_nothing(saved):
    manifest = manifest_of(saved)
    tensor = manifest["tensors"]["w"]
    file = manifest["files"]["r00000.safetensors"]
    tensor["shape"] = [1 << 20, 1 << 18]
    manifest["block_bytes"] = 1 << 30
    tensor["chunks"][0] |= {"shape": tensor["shape"], "bytes": 1 << 40, "checksums": "0" * 8192}
    file["bytes"] = file["header_bytes"] + (1 << 40)
    rewrite_manifest(saved, manifest)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert_refused(saved, "but .* were saved", CorruptError)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


COMMITS = {
    "empty": b"",
    "spaces": b'{"format": "vescale-ckpt"}',
    "not JSON": b"committed",
    "endless": b"[" * 4000,
    "too large": b" " * 5000,
    "escape": json.dumps(
        {
            "format": "vescale-ckpt", "version": 1, "generation": "../other",
            "manifest_bytes": 3, "manifest_sha256": "0" * 64,
        }
    ).encode(),
}  # fmt: skip


@pytest.mark.parametrize("content", COMMITS.values(), ids=COMMITS)
def test_commit_record_that_is_none(saved, content):
    from pathlib import Path

    (Path(saved) / "COMMIT").write_bytes(content)
    assert_refused(saved, "COMMIT", CheckpointError)


def test_a_header_that_says_something_else_than_the_manifest(saved):
    # Our reader never looks at it, but other tools would read other tensors than we do.
    import zlib

    file = generation_of(saved) / "r00000.safetensors"
    content = bytearray(file.read_bytes())
    content[content.index(b"[3,4]")] = ord("{")
    content[content.index(b"{3,4]")] = ord("[")
    content[content.index(b"[3,4]") : content.index(b"[3,4]") + 5] = b"[4,3]"
    file.write_bytes(content)
    manifest = manifest_of(saved)
    record = manifest["files"]["r00000.safetensors"]
    record["header_checksum"] = f"{zlib.crc32(content[: record['header_bytes']]):08x}"
    rewrite_manifest(saved, manifest)
    with pytest.raises(CorruptError, match="at odds with the manifest"):
        verify(saved)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
@pytest.mark.parametrize("file", ["COMMIT", "manifest.json", "r00000.safetensors"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(saved, file):
    place = Path(saved) / file if file == "COMMIT" else generation_of(saved) / file
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(CorruptError):
        read(saved)
