"""A bump moves the version file and the changelog together, and refuses to skip a release."""

import dataclasses
import datetime

import pytest
from packaging.specifiers import SpecifierSet

from tools import bump, packages

DAY = datetime.date(2026, 11, 20)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of its own folder, at 0.1.3 with an unreleased section."""
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    made = dataclasses.replace(packages.find("rng"))
    made.version_file.parent.mkdir(parents=True)
    made.version_file.write_text('"""One place."""\n\n__version__ = "0.1.3"\n')
    (made.folder / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.3 (unreleased)\n\n- New\n")
    return made


@pytest.mark.parametrize(
    ("part", "new"), [("patch", "0.1.4"), ("minor", "0.2.0"), ("major", "1.0.0")]
)
def test_following(part, new):
    assert bump.next_version("0.1.3", part) == new


def test_release_dates_the_heading_and_the_next_opens_one_above(package):
    assert bump.bump(package, "release", DAY) == "0.1.3"
    assert bump.bump(package, "minor", DAY) == "0.2.0"
    assert package.version == "0.2.0"
    log = (package.folder / "CHANGELOG.md").read_text()
    assert log == ("# Changelog\n\n## 0.2.0 (unreleased)\n\n## 0.1.3 (2026-11-20)\n\n- New\n")


def test_a_bump_over_an_unreleased_section_is_refused(package):
    with pytest.raises(ValueError, match="release that first"):
        bump.bump(package, "minor", DAY)
    assert package.version == "0.1.3"


def test_a_second_release_of_the_same_version_is_refused(package):
    bump.bump(package, "release", DAY)
    with pytest.raises(ValueError, match="no heading"):
        bump.bump(package, "release", DAY)


def test_release_candidates_lead_to_the_release_whose_heading_stands_there(package):
    assert [bump.bump(package, "rc", DAY) for _ in range(2)] == ["0.1.3rc1", "0.1.3rc2"]
    assert "## 0.1.3 (unreleased)" in (package.folder / "CHANGELOG.md").read_text()
    with pytest.raises(ValueError, match="is a pre-release"):
        bump.bump(package, "minor", DAY)
    assert bump.bump(package, "release", DAY) == package.version == "0.1.3"
    with pytest.raises(ValueError, match="open the next version"):
        bump.bump(package, "rc", DAY)


@pytest.mark.parametrize(
    ("before", "version", "after"),
    [
        ("0.1,<0.2", "0.1.0rc1", "0.1.0rc1,<0.2"),  # the first release, which 0.1 leaves out
        ("0.1.0rc1,<0.2", "0.1.0rc2", "0.1.0rc2,<0.2"),
        ("0.1.0rc2,<0.2", "0.1.0", "0.1,<0.2"),
        ("0.1,<0.2", "0.1.1rc1", "0.1,<0.2"),
        ("0.1,<0.2", "0.2.0", "0.1,<0.3"),
        ("0.1,<0.3", "0.2.0rc1", "0.1,<0.3"),
        ("0.2,<0.3", "0.2.0rc1", "0.2.0rc1,<0.3"),
        ("0.9,<0.10", "1.0.0", "0.9,<2"),
        ("1.1,<2", "1.2.0", "1.1,<2"),
    ],
)
def test_ranges_of_others_hold_the_new_version(before, version, after):
    text = 'a = ["vescale-rng>={}", "vescale-comm>=0.1,<0.2"]'
    assert bump.stretched(text.format(before), "vescale-rng", version) == text.format(after)
    assert version in SpecifierSet(f">={after}", prereleases=True)


def test_a_bump_rewrites_the_ranges_of_all_files(package):
    path = packages.ROOT / "packages" / "vescale-dtensor" / "pyproject.toml"
    path.parent.mkdir()
    path.write_text('dependencies = ["vescale-rng>=0.1,<0.2"]')
    bump.bump(package, "release", DAY)
    bump.bump(package, "minor", DAY)
    assert path.read_text() == 'dependencies = ["vescale-rng>=0.1,<0.3"]'
