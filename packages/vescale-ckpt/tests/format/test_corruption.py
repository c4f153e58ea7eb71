"""No damaged byte goes unnoticed: reading fails closed and says which file and which range."""

import random
from pathlib import Path

import pytest
import torch
from edited_checkpoint import damage, generation_of
from vescale_ckpt import CheckpointError, CorruptError, UncommittedError, load, read, save, verify
from vescale_ckpt._format.checksums import BLOCK_BYTES


def small_state():
    return {"a": torch.arange(20.0), "b": torch.arange(7), "s": torch.tensor(1.5), "n": [1, 2.5]}


@pytest.fixture
def saved(path):
    save(path, small_state())
    return Path(path)


def files_in(saved):
    return sorted(file for file in saved.rglob("*") if file.is_file())


def assert_refused(saved):
    """Every way of reading refuses."""
    into = {**small_state(), "a": torch.zeros(20)}
    for attempt in (read, verify, lambda path: load(path, into)):
        with pytest.raises(CheckpointError):
            attempt(saved)


def test_a_flipped_bit_in_any_byte_of_any_file(saved):
    chance = random.Random(0)
    assert len(files_in(saved)) == 3
    for file in files_in(saved):
        original = file.read_bytes()
        for at in range(len(original)):
            damaged = bytearray(original)
            damaged[at] ^= 1 << chance.randrange(8)
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                read(saved)
        file.write_bytes(original)
    assert verify(saved).tensors == 3


@pytest.mark.parametrize("kept", [0, 0.5, -1])
def test_truncation_of_every_file(saved, kept):
    for file in files_in(saved):
        original = file.read_bytes()
        length = {0: 0, 0.5: len(original) // 2, -1: len(original) - 1}[kept]
        file.write_bytes(original[:length])
        assert_refused(saved)
        file.write_bytes(original)
    verify(saved)


def test_appended_bytes_and_missing_files(saved):
    for file in files_in(saved):
        original = file.read_bytes()
        file.write_bytes(original + b"\0")
        assert_refused(saved)
        file.unlink()
        assert_refused(saved)
        file.write_bytes(original)
    verify(saved)


def test_swapped_data_files(tmp_path):
    save(tmp_path / "a", {"x": torch.zeros(9)})
    save(tmp_path / "b", {"x": torch.ones(9)})
    donor = generation_of(tmp_path / "b") / "r00000.safetensors"
    (generation_of(tmp_path / "a") / "r00000.safetensors").write_bytes(donor.read_bytes())
    assert_refused(tmp_path / "a")


def test_the_message_names_file_tensor_and_range(path):
    save(path, {"w": torch.zeros(3, BLOCK_BYTES // 4)})
    file = generation_of(path) / "r00000.safetensors"
    damage(path, -5)
    end = file.stat().st_size
    expected = rf"{file}: bytes {end - BLOCK_BYTES} to {end} do not match .* 'w' \[0:3, 0:65536\]"
    with pytest.raises(CorruptError, match=expected):
        read(path)
    with pytest.raises(CorruptError, match=r"1 problem\(s\)"):
        verify(path)


def test_damage_in_a_part_that_is_not_needed_does_not_matter_to_load(path):
    from emulated_ranks import assert_filled, sharded

    whole = torch.arange(4.0 * BLOCK_BYTES // 4).reshape(4, BLOCK_BYTES // 4)
    save(path, {"w": whole})
    damage(path, -5)
    first, second = sharded(whole, 2, fill=False)
    load(path, into={"w": first})
    assert_filled(first, whole)
    with pytest.raises(CorruptError):
        load(path, into={"w": second})


def test_verify_lists_every_problem(path):
    save(path, {"a": torch.zeros(9), "b": torch.zeros(9), "c": torch.zeros(9)})
    damage(path, -5)
    damage(path, -77)
    with pytest.raises(CorruptError, match=r"2 problem\(s\).*'a' \[0:9\].*'c' \[0:9\]"):
        verify(path)


def test_without_commit_it_is_visibly_not_a_checkpoint(saved):
    (saved / "COMMIT").unlink()
    with pytest.raises(UncommittedError, match="no COMMIT record"):
        read(saved)


def test_unknown_entries_are_ignored(saved):
    (saved / "notes.txt").write_text("mine")
    (saved / "g-0000000000000000").mkdir()
    verify(saved)
