"""FORMAT.md is enough: a reader without our code or torch agrees, and so does safetensors."""

import inspect
import math

import numpy as np
import pytest
import reference_reader
import torch
from edited_checkpoint import damage, generation_of, manifest_of
from emulated_ranks import bits, save_on, sharded, succeed
from vescale_ckpt import RankLocal, read, save
from vescale_ckpt._tensors.dtypes import STORED_AS, torch_dtype


def test_the_reference_reader_agrees(path):
    whole = torch.randn(7, 5)
    common = {
        "values": [1, 2.5, math.inf, None, True, (2**70, {"1": 1, 1: "x"})],
        "c": torch.randn(3, dtype=torch.complex64),
        "s": torch.tensor(True),
        "e": torch.empty(0, 3),
    }
    states = [
        {"w": {"sharded": piece}, "own": RankLocal({"rank": rank}), **common}
        for rank, piece in enumerate(sharded(whole, 3))
    ]
    succeed(save_on(states, path))
    found = reference_reader.read_checkpoint(path)
    assert np.array_equal(found["w"]["sharded"], whole.numpy())
    assert found["values"] == common["values"]
    assert np.array_equal(found["c"], common["c"].numpy())
    assert (found["s"].shape, bool(found["s"])) == ((), True)
    assert found["e"].shape == (0, 3)
    assert found["own"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def test_the_reference_reader_is_short_and_stands_alone():
    source = inspect.getsource(reference_reader)
    code = [line for line in source.splitlines() if line.strip() and not line.startswith('"""')]
    assert len(code) <= 60
    assert "torch" not in source.replace("or torch", "")
    assert "vescale_ckpt" not in source


def test_the_reference_reader_notices_damage(path):
    save(path, {"w": torch.zeros(100)})
    damage(path)
    with pytest.raises(AssertionError):
        reference_reader.read_checkpoint(path)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_data_file_opens_in_safetensors(path):
    library = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    raw = torch.arange(96, dtype=torch.uint8) % 2
    state = {name: raw.view(torch_dtype(name)) for name in STORED_AS}
    save(path, state)
    opened = library.load_file(generation_of(path) / "r00000.safetensors")
    assert opened.keys() == state.keys()
    for name, tensor in opened.items():
        assert bits(tensor).equal(raw)
        if STORED_AS[name].per_element == 1 and STORED_AS[name].safetensors != "U8":
            assert tensor.dtype is torch_dtype(name)


def test_pieces_open_in_safetensors_under_names_with_their_box(path):
    library = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    whole = torch.randn(4, 6)
    succeed(save_on([{"m": {"w": piece}} for piece in sharded(whole, 2, 1)], path))
    for rank, part in enumerate(whole.chunk(2, 1)):
        opened = library.load_file(generation_of(path) / f"r0000{rank}.safetensors")
        assert list(opened) == [f"m/w~[0:4, {rank * 3}:{rank * 3 + 3}]"]
        assert opened[f"m/w~[0:4, {rank * 3}:{rank * 3 + 3}]"].equal(part)


def test_chunks_are_aligned_and_every_byte_is_under_a_checksum(path):
    dtypes = (torch.int8, torch.float64, torch.int16)
    save(path, {f"{d}{n}": torch.zeros(n, dtype=d) for n in (1, 3) for d in dtypes})
    manifest = manifest_of(path)
    (file,) = manifest["files"].values()
    assert file["header_bytes"] % 64 == 0
    covered = file["header_bytes"]
    chunks = [(t["dtype"], c) for t in manifest["tensors"].values() for c in t["chunks"]]
    for dtype, chunk in sorted(chunks, key=lambda entry: entry[1]["start"]):
        assert chunk["start"] == covered
        assert chunk["start"] % STORED_AS[dtype].itemsize == 0
        covered += chunk["bytes"]
    assert covered == file["bytes"]


def test_saving_twice_gives_the_same_data_files(tmp_path):
    for name in "ab":
        save(tmp_path / name, {"w": torch.arange(10), "x": 1})
    a, b = (generation_of(tmp_path / n) / "r00000.safetensors" for n in "ab")
    assert a.read_bytes() == b.read_bytes()
    assert read(tmp_path / "a").keys() == read(tmp_path / "b").keys()
