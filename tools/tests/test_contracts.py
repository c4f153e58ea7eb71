"""The contracts catch an undeclared import and a private one, wherever they hide."""

import dataclasses

import pytest

from tools import contracts, packages


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package ckpt, which declares none of its siblings, with one empty source file."""
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    made = dataclasses.replace(packages.find("ckpt"))
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
