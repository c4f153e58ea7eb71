"""What users import is where they find it: every public name, in every public module."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import vescale_comm

# After the first line; one that begins with spaces goes on.
LINES = Path(__file__).with_name("public_names.txt").read_text().replace("\n    ", " ").splitlines()
PUBLIC = {name: names.split() for name, _, names in (line.partition(": ") for line in LINES[1:])}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_module_exports_these_names_and_has_them(name):
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(PUBLIC[name])
    assert [each for each in PUBLIC[name] if not hasattr(module, each)] == []


def test_there_are_no_other_public_modules():
    found = {each.name for each in pkgutil.iter_modules(vescale_comm.__path__, "vescale_comm.")}
    public = {name for name in found if not name.startswith("vescale_comm._")}
    assert {"vescale_comm", *public} == set(PUBLIC)


def test_what_the_package_itself_imports_is_not_taken_for_public():
    named = {each for each in vars(vescale_comm) if not each.startswith("_")}
    modules = {name.partition(".")[2] for name in PUBLIC} - {""}
    assert named - modules <= set(PUBLIC["vescale_comm"])


FIRST = """
import importlib, os, sys
import torch
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        module = importlib.import_module(name)
        [getattr(module, each) for each in module.__all__]
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


def test_a_public_module_can_be_imported_first():
    # Each in a process of its own: here everything is imported already, whatever the order.
    command = [sys.executable, "-W", "error", "-c", FIRST, *PUBLIC]
    subprocess.run(command, check=True, timeout=120)
