"""The public names are a list that only grows, each is documented, and each module says its use."""

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest
import vescale_parallel


def promised() -> dict[str, list[str]]:
    """Names by those of `public_names.txt`; a line that begins with spaces goes on."""
    text = Path(__file__).with_name("public_names.txt").read_text()
    kept = "\n".join(line for line in text.splitlines() if line[0] != "#")
    lines = kept.replace("\n    ", " ").splitlines()
    return {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}


PUBLIC = promised()
SOURCES = sorted(Path(vescale_parallel.__file__).parent.rglob("*.py"))


def members(name: str) -> list[str]:
    """The parameters of a function; the fields, methods and properties of a class of ours."""
    value = getattr(vescale_parallel, name)
    if inspect.isfunction(value):
        return sorted(inspect.signature(value).parameters)
    if not inspect.isclass(value) or issubclass(value, Exception):
        return []
    declared = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    fields = {field.name for field in declared}
    return sorted(fields | {one for one in vars(value) if not one.startswith("_")})


def test_every_promised_name_is_exported_and_no_other():
    assert sorted(vescale_parallel.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(vescale_parallel, name, None) is not None


@pytest.mark.parametrize("name", PUBLIC)
def test_members_and_parameters_are_those_that_were_promised(name: str):
    assert members(name) == PUBLIC[name]


@pytest.mark.parametrize("name", sorted({*PUBLIC} - {"__version__"}))
def test_public_names_are_documented(name: str):
    value = getattr(vescale_parallel, name)
    assert inspect.getdoc(value)
    assert value.__module__.startswith("vescale_parallel")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_module_says_what_it_is_for(path: Path):
    assert ast.get_docstring(ast.parse(path.read_text()))
