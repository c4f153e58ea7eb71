"""What docstrings and comments of the sources name between backticks exists."""

import pytest
import vescale_dtensor
from docstring_names import Sources


@pytest.fixture(scope="module")
def sources():
    return Sources(vescale_dtensor)


def test_every_name_in_a_docstring_exists(sources):
    assert sources.unknown() == []
    assert sources.known > 150  # the test looks at something


NO_NAMES = [
    "_no_such_thing",
    "compile.no_such_function",
    "_ops/no_such_file.py",
    "Layout.cut_up",
    "vescale_dtensor.DTensor.no_such_method",
    "F.no_such_function",
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_names_that_do_not_exist_are_noticed(sources, name):
    assert sources.exists(name, sources.files[0]) is False
