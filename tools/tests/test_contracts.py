"""The contracts catch an undeclared import, a private one and an upward one, wherever they hide."""

import dataclasses

import pytest

from tools import contracts, packages


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package ckpt, which declares no siblings, without layers, with one empty source file."""
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    made = dataclasses.replace(packages.find("ckpt"), layers=())
    (made.source / made.module).mkdir(parents=True)
    made.tests.mkdir()
    return made


def faults(package, folder, code):
    """What is found when that code lies in that folder."""
    (folder / "test_some.py").write_text(code)
    return [*contracts.import_faults(package)]


@pytest.mark.parametrize(
    "code",
    [
        "import vescale_dtensor",
        "from vescale_dtensor import DTensor",
        "def f():\n    import vescale_dtensor.plan",
        "import scipy",
    ],
)
def test_an_undeclared_import_is_a_fault(package, code):
    (fault,) = faults(package, package.source, code)
    assert "which it does not declare" in fault


@pytest.mark.parametrize(
    "code", ["import os", "import torch", "import numpy as np", "from . import _x", "import fsspec"]
)
def test_declared_and_standard_imports_pass(package, code):
    assert faults(package, package.source, code) == []


@pytest.mark.parametrize(
    "code", ["from vescale_comm import _group", "from vescale_comm._group import Group"]
)
def test_a_private_import_is_a_fault_in_tests_too(package, code):
    (fault,) = faults(package, package.tests, code)
    assert "which is private to vescale-comm" in fault


def test_tests_may_import_what_the_table_grants_them(package):
    assert faults(package, package.tests, "from vescale_comm.testing import run") == []
    assert faults(package, package.tests, "import vescale_dtensor") != []


def test_every_package_but_the_top_has_a_generated_contract():
    config = contracts.linter_config()
    assert "[importlinter:contract:rng]" in config
    assert config.count("type = forbidden") == len(packages.PACKAGES) - 1


LAYERED = {
    "__init__": "from vescale_ckpt._top.door import knock",
    "_top/__init__": "",
    "_top/door": "from vescale_ckpt._base import first\n\n\ndef knock(): ...",
    "_side": "from vescale_ckpt._base.second import two",
    "_base/__init__": "",
    "_base/first": "from vescale_ckpt._base.second import two",
    "_base/second": "two = 2",
}


@pytest.fixture
def layered(package):
    """The same, of two layers; the upper one has two neighbours."""
    made = dataclasses.replace(package, layers=("_top | _side", "_base"))
    for name, code in LAYERED.items():
        put(made, name, code)
    return made


def put(package, name, code):
    path = package.source / package.module / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)


def broken(package, capfd):
    """Names of the contracts that it breaks, as import-linter prints them."""
    status = contracts.run_linter([package])
    printed = capfd.readouterr().out
    found = [line.removesuffix(" BROKEN") for line in printed.splitlines() if "BROKEN" in line]
    assert bool(status) == bool(found), printed
    return found


def test_layers_that_import_downwards_keep_every_contract(layered, capfd):
    assert broken(layered, capfd) == []
    assert [*contracts.upward_faults(layered)] == []


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("_base/first", "def f():\n    from vescale_ckpt._side import two"),
        (
            "_base/first",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vescale_ckpt._side",
        ),
        ("_side", "from vescale_ckpt._top import door"),
        ("_nowhere", ""),
    ],
    ids=["inside a function", "for types only", "beside it", "in no layer"],
)
def test_an_upward_import_breaks_the_layers(layered, capfd, name, code):
    put(layered, name, code)
    # Where the lower one is also imported by the upper one, that is a circle besides.
    assert "vescale-ckpt imports downwards only" in broken(layered, capfd)


def test_a_circle_inside_a_layer_is_broken_too(layered, capfd):
    put(layered, "_base/second", "two = 2\n\n\ndef f():\n    import vescale_ckpt._base.first")
    assert broken(layered, capfd) == ["vescale-ckpt has no circle of imports"]


@pytest.mark.parametrize(
    ("name", "code", "of"),
    [
        ("_base/second", "from vescale_ckpt import knock", "vescale_ckpt"),
        ("_base/second", "import vescale_ckpt", "vescale_ckpt"),
        ("_base/second", "from vescale_ckpt._base import two", "vescale_ckpt._base"),
    ],
)
def test_a_package_is_not_imported_from_inside_it(layered, name, code, of):
    put(layered, name, code)
    (fault,) = contracts.upward_faults(layered)
    assert f"imports from {of}, the package that it lies in" in fault


def test_a_package_without_layers_is_not_ordered(package, capfd):
    put(package, "__init__", "")
    put(package, "a", "import vescale_ckpt.b")
    put(package, "b", "import vescale_ckpt.a")
    assert "layers" not in contracts.linter_config([package])
    assert [*contracts.upward_faults(package)] == []
