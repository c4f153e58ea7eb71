"""What docstrings and comments name between backticks exists, in all packages."""

import importlib
import importlib.util

import pytest

from tools.packages import PACKAGES, find

FINDER = find("vescale-dtensor").tests / "support" / "docstring_names.py"
# Objects, files and names of modules in the programs of users.
OBJECTS = ("`plan.check`", "`plan.with_`", "`model.double`", "`save.py`", "`_proj`")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda one: one.short)
def test_every_name_in_a_docstring_exists(package):
    spec = importlib.util.spec_from_file_location("docstring_names", FINDER)
    finder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(finder)
    sources = finder.Sources(importlib.import_module(package.module))
    assert [one for one in sources.unknown() if not one.endswith(OBJECTS)] == []
    assert sources.known > 10  # the test looks at something
