"""SUPPORT.md is what a run finds, and nothing in it is wrong."""

import vescale_comm_support as support


def test_the_table_is_what_a_run_finds():
    found = support.table()
    assert "| x |" not in found
    assert found.count("g s") > 800
    assert support.FILE.read_text() == found
