"""Hostile folders of weights are refused with an error of ours, and nothing outside is read."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vescale_parallel import PretrainedError, load_pretrained, save_pretrained

INDEX = "model.safetensors.index.json"


class One(nn.Module):
    """A model of one tensor."""

    def __init__(self, value: torch.Tensor | None = None) -> None:
        super().__init__()
        value = torch.zeros(4) if value is None else value
        self.w = nn.Parameter(value, requires_grad=False)


def blob(header: bytes, data: bytes = bytes(range(16))) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


HEALTHY = blob(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}')


def refused(folder: Path, words: str) -> None:
    model = One()
    with pytest.raises(PretrainedError, match=words):
        load_pretrained(model, folder)
    assert not model.w.any()


# The rules are those of the checkpoints' importer, whose tests try all of them.
FILES = {
    "fraction": (blob(b'{"w":{"dtype":"F32","shape":[4.9],"data_offsets":[0,16]}}'), "of sizes"),
    "bool": (blob(b'{"w":{"dtype":"F32","shape":[true,4],"data_offsets":[0,16]}}'), "of sizes"),
    "twice": (
        blob(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
             b'"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'), "appears twice",
    ),
    "BOM": (blob(b"\xef\xbb\xbf" + HEALTHY[8:-16]), "does not begin with an object"),
    "2^63": (
        blob(b'{"w":{"dtype":"F32","shape":[0],"data_offsets":[%d,%d]}}' % ((1 << 63,) * 2)),
        "bytes of data",
    ),
    "deep": (blob(b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "an object is due"),
    "many dims": (
        blob(b'{"w":{"dtype":"F32","shape":[' + b"1," * 40_000 + b'4],"data_offsets":[0,16]}}'),
        "of sizes",
    ),
    "hole": (blob(b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[12,16]}}'), "is due"),
    "half a character": (blob(b'{"\\ud800":{}}'), "surrogates"),
    "pickle": (b"\x80\x02}q\x00.", "truncated"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "words"), FILES.values(), ids=FILES)
def test_files(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path, rf"model.safetensors' is no whole safetensors file: .*{words}")


INDICES: dict[str, tuple[Any, str]] = {
    "above": ({"weight_map": {"w": "../private/x.safetensors"}}, "no name of a file"),
    "absolute": ({"weight_map": {"w": "/etc/passwd"}}, "no name of a file"),
    "below": ({"weight_map": {"w": "a/x.safetensors"}}, "no name of a file"),
    "itself": ({"weight_map": {"w": "."}}, "no name of a file"),
    "a number": ({"weight_map": {"w": 3}}, "no name of a file"),
    "absent": ({"weight_map": {"w": "none.safetensors"}}, "none.safetensors"),
    "empty": ({"weight_map": {}}, "that names tensors"),
    "a list": ([], "must be an object"),
    "no map": ({}, "must be an object"),
}


@pytest.mark.parametrize(("index", "words"), INDICES.values(), ids=INDICES)
def test_indices(tmp_path: Path, index: Any, words: str) -> None:
    folder = tmp_path / "weights"
    for name in ("private", "weights/a"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.safetensors").write_bytes(HEALTHY)
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, words)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000, b"9" * 5000, b'{"a":1,"a":2}'])
def test_indices_that_are_no_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / INDEX).write_bytes(content)
    refused(tmp_path, "is no index of weights")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
@pytest.mark.parametrize("target", ["pipe", "/dev/zero", "."])
@pytest.mark.parametrize("name", [INDEX, "model.safetensors", "part.safetensors"])
def test_what_is_no_file_is_not_read(tmp_path: Path, name: str, target: str) -> None:
    if name.startswith("part"):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    if target == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to(target)
    refused(tmp_path, "not a regular file")


def test_links_of_a_cache_of_downloads_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs" / "0a1b").write_bytes(HEALTHY)
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0a1b")
    assert load_pretrained(One(), tmp_path / "snapshot").w.any()


VALID = {
    "column of a row": torch.rand(1, 3)[:, :1],
    "every second of two": torch.rand(2)[::2],
    "stride 0": torch.rand(1).expand(1, 1),
    "complex": torch.rand(2, dtype=torch.complex64)[::2],
    "empty and large": torch.empty(0, 1 << 40),
    "64 dims": torch.rand([1] * 64),
}


@pytest.mark.parametrize("value", VALID.values(), ids=VALID)
def test_valid_tensors_come_back(tmp_path: Path, value: torch.Tensor) -> None:
    save_pretrained(One(value), tmp_path)
    found = load_pretrained(One(torch.zeros_like(value)), tmp_path).w
    assert torch.equal(found, value)


@pytest.mark.parametrize(
    "value",
    [torch.rand([1] * 65), torch.empty(0).as_strided((0, 1 << 61, 1 << 61), (1, 1, 1))],
    ids=["65 dims", "empty beyond"],
)
def test_what_could_not_be_read_is_not_saved(tmp_path: Path, value: torch.Tensor) -> None:
    with pytest.raises(PretrainedError, match=r"'w' has \d+ dims"):
        save_pretrained(One(value), tmp_path)
    assert not any(tmp_path.iterdir())
