"""Checkpoints that earlier versions wrote, kept as files, still read the same."""

from pathlib import Path

import pytest
import reference_reader
from edited_checkpoint import manifest_of
from golden_state import PLAIN, VALUES, WHOLE, make
from vescale_ckpt import PerRank, read, verify

GOLDEN = sorted((Path(__file__).parent / "golden").iterdir())


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_golden_checkpoint(path):
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
    now, golden = manifest_of(tmp_path / "now"), manifest_of(GOLDEN[-1])
    for manifest in (now, golden):
        del manifest["provenance"]
    assert now == golden


def test_the_reference_reader_reads_it(monkeypatch):
    # numpy has no bfloat16: its bits will do.
    monkeypatch.setitem(reference_reader.DTYPES, "bfloat16", "<u2")
    assert reference_reader.read_checkpoint(GOLDEN[-1])["sharded"].tolist() == WHOLE.tolist()
