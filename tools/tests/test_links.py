"""A package's page on PyPI leads to the files of its release."""

import re
import tomllib

import pytest

from tools.links import absolute, with_urls
from tools.packages import PACKAGES, ROOT

HOME, TAG = "https://github.com/o/r", "vescale-rng-v0.1.0"
BELOW = f"{HOME}/blob/{TAG}/packages/vescale-rng"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see [it](SPEC.md)", f"see [it]({BELOW}/SPEC.md)"),
        ("[a](SPEC.md#part) [b](../vescale-comm)",
         f"[a]({BELOW}/SPEC.md#part) [b]({HOME}/blob/{TAG}/packages/vescale-comm)"),
        ("![p](docs/a.svg)", f"![p]({HOME}/raw/{TAG}/packages/vescale-rng/docs/a.svg)"),
        ("[x](https://arxiv.org/abs/1) [y](#below) [z](mailto:a@b)",) * 2,
        ("```python\nx = y[0](z)\n```\n",) * 2,
    ],
)  # fmt: skip
def test_relative_links_become_absolute_and_others_stay(text, expected):
    assert absolute(text, HOME, TAG, "packages/vescale-rng") == expected


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.short)
def test_every_link_of_a_package_leads_to_a_file_of_the_repository(package):
    text = absolute(
        (package.folder / "README.md").read_text(), HOME, TAG, f"packages/{package.name}"
    )
    outside_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for place in re.findall(rf"\]\({re.escape(HOME)}/(?:blob|raw)/{TAG}/([^)#\s]+)", outside_code):
        assert (ROOT / place).exists(), place


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.short)
def test_the_project_gets_its_addresses_once(package):
    folder = f"packages/{package.name}"
    text = with_urls((package.folder / "pyproject.toml").read_text(), HOME, TAG, folder)
    project = tomllib.loads(text)
    assert project["project"]["urls"]["Homepage"] == HOME
    assert project["tool"]["hatch"]["version"], "what came after it is still there"
    with pytest.raises(ValueError, match="already"):
        with_urls(text, HOME, TAG, folder)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.short)
def test_what_an_index_shows_is_said(package):
    project = tomllib.loads((package.folder / "pyproject.toml").read_text())["project"]
    assert project["authors"]
    assert len(project["keywords"]) >= 4
    kinds = {one.split(" :: ")[0] for one in project["classifiers"]}
    wanted = {"Development Status", "Intended Audience", "Programming Language", "Topic", "Typing"}
    assert wanted <= kinds
