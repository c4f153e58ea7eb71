"""What users import is where they find it, and no public name has gone."""

import pkgutil
from pathlib import Path

import torch
import vescale_dtensor as vd
from vescale_dtensor import storage

# After the first line; one that begins with spaces goes on.
LINES = Path(__file__).with_name("public_names.txt").read_text().replace("\n    ", " ").splitlines()
NAMES, STORAGE, METHODS, MODULES = (line.split()[1:] for line in LINES[1:])


def test_the_package_exports_these_names_and_has_them():
    assert sorted(vd.__all__) == sorted(NAMES)
    assert [name for name in NAMES if not hasattr(vd, name)] == []


def test_hooks_for_layers_above_stand_in_a_module_of_their_own():
    assert sorted(storage.__all__) == sorted(STORAGE)
    assert [name for name in STORAGE if not hasattr(storage, name)] == []
    assert not set(STORAGE) & set(vd.__all__)


def test_a_dtensor_has_these_methods():
    own = {name for name in vars(vd.DTensor) if not name.startswith("_")}
    assert sorted(name for name in own if not hasattr(torch.Tensor, name)) == METHODS


def test_there_are_no_other_public_modules():
    found = {m.name for m in pkgutil.iter_modules(vd.__path__) if not m.name.startswith("_")}
    assert sorted(found) == MODULES
