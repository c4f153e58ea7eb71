"""Checkpoints that earlier versions wrote, kept as files, still read the same."""

import importlib.util
from pathlib import Path

import pytest
import reference_reader
from edited_checkpoint import manifest_of
from golden_state import PLAIN, VALUES, WHOLE, make
from vescale_ckpt import FormatError, PerRank, read, verify

GOLDEN = sorted((Path(__file__).parent.parent / "golden").iterdir())


HAS_XXHASH = importlib.util.find_spec("xxhash") is not None


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_golden_checkpoint(path):
    if path.name.endswith("xxh3") and not HAS_XXHASH:
        # What cannot be verified is not read.
        with pytest.raises(FormatError, match="pip install xxhash"):
            read(path)
        return
    assert verify(path).tensors == 1 + len(PLAIN)
    state = read(path)
    assert list(state) == ["sharded", "plain", "values", "own"]
    assert state["sharded"].equal(WHOLE)
    assert repr(state["values"]) == repr(VALUES)
    assert state["own"] == PerRank(({"rank": 0}, {"rank": 1}))
    for name, tensor in PLAIN.items():
        assert state["plain"][name].dtype is tensor.dtype
        assert state["plain"][name].equal(tensor)


def test_the_newest_golden_checkpoint_is_what_is_written_now(tmp_path):
    make(tmp_path / "now")
    newest = "v2-xxh3" if HAS_XXHASH else "v2"
    now, golden = manifest_of(tmp_path / "now"), manifest_of(GOLDEN[0].parent / newest)
    for manifest in (now, golden):
        del manifest["provenance"]
    assert now == golden


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_the_reference_reader_reads_it(path, monkeypatch):
    # numpy has no bfloat16: its bits will do.
    monkeypatch.setitem(reference_reader.DTYPES, "bfloat16", "<u2")
    if path.name.endswith("xxh3") and not HAS_XXHASH:
        with pytest.raises(ImportError):
            reference_reader.read_checkpoint(path)
        return
    assert reference_reader.read_checkpoint(path)["sharded"].tolist() == WHOLE.tolist()
