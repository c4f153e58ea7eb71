"""Which cases are in the core follows from their names and the table alone."""

import random
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from vescale_comm.testing import choose_core

TABLE = """# a comment
room/test_steps 4
room/test_steps::test_clipping 3  # and its reason
room/test_steps::test_long 0
room/test_steps::test_steps[case 7]
"""


def collected(folder):
    """Stand-ins for pytest's items: ten cases of each of two tests, and tests without cases."""
    file = folder / "room" / "test_steps.py"
    named = [(f"test_{test}", f"[case {n}]") for test in ("steps", "clipping") for n in range(10)]
    named += [("test_long", ""), ("test_alone", "")]
    for test, case in named:
        marks = []
        item = SimpleNamespace(path=file, originalname=test, name=test + case, marks=marks)
        item.add_marker = marks.append
        if case:
            item.callspec = None
        yield item


def core_of(items, folder):
    choose_core(items, folder)
    assert all(item.marks in ([], ["slow"]) for item in items)
    return {item.name for item in items if not item.marks}


def smallest(test, count):
    names = [f"{test}[case {n}]" for n in range(10)]
    return set(sorted(names, key=lambda name: zlib.crc32(name.encode()))[:count])


def test_a_table_chooses_by_name(tmp_path):
    (tmp_path / "core.txt").write_text(TABLE)
    chosen = core_of(list(collected(tmp_path)), tmp_path)
    steps = smallest("test_steps", 3) | {"test_steps[case 7]"}
    assert chosen == steps | smallest("test_clipping", 4) | {"test_alone"}


def test_the_order_in_which_cases_are_collected_does_not_matter(tmp_path):
    (tmp_path / "core.txt").write_text(TABLE)
    items = list(collected(tmp_path))
    random.Random(0).shuffle(items)
    assert core_of(items, tmp_path) == core_of(list(collected(tmp_path)), tmp_path)


def test_what_lies_elsewhere_is_left_alone(tmp_path):
    (tmp_path / "core.txt").write_text(TABLE)
    elsewhere = list(collected(Path("elsewhere")))
    assert len(core_of(elsewhere, tmp_path)) == len(elsewhere)


@pytest.mark.parametrize("line", ["room/test_steps", "room/test_steps four", "4", "a::b -1"])
def test_a_line_of_another_form_is_an_error(line, tmp_path):
    (tmp_path / "core.txt").write_text(f"# fine\n{line}\n")
    with pytest.raises(ValueError, match=r"core\.txt:2: not `file share`"):
        choose_core([], tmp_path)
