"""UNMODIFIED.md is what a run on this torch gives, and nothing in it is wrong."""

import pytest
import vescale_comm_unmodified as unmodified


def test_the_table_is_what_a_run_gives():
    columns = unmodified.read()
    assert unmodified.table(columns) == unmodified.FILE.read_text()
    assert "WRONG" not in unmodified.FILE.read_text()
    written = columns.get(unmodified.version())
    if written is None:
        pytest.skip(f"the table is of another torch than {unmodified.version()}")
    assert unmodified.column() == written
