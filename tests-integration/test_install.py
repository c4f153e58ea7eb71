"""Whatever set of the packages is installed, it is whole, typed, and asks for no other."""

import re
from importlib import import_module, metadata
from importlib.resources import files

import pytest

INSTALLED = sorted(
    name
    for dist in metadata.distributions()
    if (name := dist.metadata["Name"]).startswith("vescale-")
)
pytestmark = pytest.mark.smoke


def test_something_is_installed():
    assert INSTALLED


@pytest.mark.parametrize("name", INSTALLED)
def test_a_package_imports_and_knows_its_version(name):
    module = import_module(name.replace("-", "_"))
    assert module.__version__ == metadata.version(name)
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("name", INSTALLED)
def test_a_package_is_marked_as_typed(name):
    assert (files(name.replace("-", "_")) / "py.typed").is_file()


@pytest.mark.parametrize("name", INSTALLED)
def test_what_a_package_requires_of_this_family_is_installed(name):
    required = [one for one in metadata.requires(name) or [] if "extra ==" not in one]
    named = {match[0] for one in required if (match := re.match(r"vescale-[a-z]+", one))}
    assert named <= {*INSTALLED}
