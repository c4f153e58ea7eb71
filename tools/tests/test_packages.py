"""The table is the workspace: every folder is in it, and its sets are closed."""

import tomllib

import pytest

from tools.packages import (
    NEWEST_TORCH,
    PACKAGES,
    PYTHONS,
    ROOT,
    closed_sets,
    closure,
    edges,
    find,
    project_of,
    third_party,
    torch_versions,
)


def test_every_folder_is_in_the_table():
    folders = {path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml")}
    assert folders == {package.name for package in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.short)
def test_pyproject_says_what_the_table_says(package):
    project = tomllib.loads((package.folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == package.name
    assert sorted(project["dependencies"]) == sorted(package.requires)
    declared = project.get("optional-dependencies", {})
    assert {extra: sorted(found) for extra, found in declared.items()} == {
        extra: sorted(found) for extra, found in package.offered.items()
    }


def test_packages_stand_below_what_they_need():
    for at, package in enumerate(PACKAGES):
        assert {*package.siblings} <= {above.name for above in PACKAGES[:at]}


def test_closed_sets_are_those_that_hold_what_their_members_need():
    found = {frozenset(package.short for package in chosen) for chosen in closed_sets()}
    # {rng, comm, dtensor, parallel} has five closed sets: r, c, rc, rcd, rcdp. Each of them, and
    # the empty set, is there with and without ckpt; the empty set itself is not counted.
    assert len(found) == 2 * (5 + 1) - 1
    assert {"dtensor", "rng", "comm"} in found
    assert {"ckpt"} in found
    assert {"dtensor", "rng"} not in found


def test_closure_is_in_dependency_order_and_the_least():
    shorts = [package.short for package in closure(find("parallel"))]
    assert shorts == ["rng", "comm", "dtensor", "parallel"]
    assert closure(find("ckpt")) == (find("ckpt"),)


def test_edges_hold_extras_too():
    found = {(package.short, neighbour.short) for package, neighbour in edges()}
    assert ("parallel", "ckpt") in found
    assert ("ckpt", "comm") not in found, "a test-only neighbour is no edge"


def test_third_party_leaves_the_workspace_out():
    assert not [one for one in third_party(extras=True, tests=True) if "vescale" in one]


@pytest.mark.parametrize("requirement", ["numpy>=1.26", "numpy", "NumPy[x]<2"])
def test_project_of(requirement):
    assert project_of(requirement) == "numpy"


def test_declared_torches_are_the_minor_versions_from_the_lowest_to_the_newest():
    assert torch_versions("torch>=2.9", "2.11") == ("2.9", "2.10", "2.11")
    assert torch_versions()[-1] == NEWEST_TORCH


@pytest.mark.parametrize("requirement", ["torch>=2.11,<2.15", "torch>=1.11", "numpy>=2.2"])
def test_torches_without_a_lowest_minor_version_cannot_be_listed(requirement):
    with pytest.raises(ValueError, match=r"torch>=A\.B"):
        torch_versions(requirement)


def test_every_package_warns_of_the_same_torches():
    files = [package.source / package.module / "_torch_versions.py" for package in PACKAGES]
    assert len({file.read_text() for file in files}) == 1
    ends = [tuple(map(int, torch_versions()[end].split("."))) for end in (0, -1)]
    assert f"OLDEST, NEWEST = {ends[0]}, {ends[1]}\n" in files[0].read_text()
    newest = tuple(map(int, PYTHONS[-1].split(".")))
    assert f"NEWEST_PYTHON = {newest}\n" in files[0].read_text()
    for package in PACKAGES:
        opening = (package.source / package.module / "__init__.py").read_text()
        first = f"from {package.module} import _torch_versions as _torch_versions\n"
        before = opening.partition(first)[0]
        assert before != opening
        assert "vescale_" not in before.split('"""')[-1], "it comes before what may break"


def test_packages_that_read_files_of_others_have_one_reader():
    files = [package.source / package.module / "_untrusted.py" for package in PACKAGES]
    known = [file.read_text() for file in files if file.exists()]
    assert len(known) == 2
    assert len(set(known)) == 1


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="'ring'; there are: rng, comm"):
        find("ring")
