"""A tag names one package and one version, and nothing else passes for a tag."""

import subprocess
from types import SimpleNamespace

import pytest

from tools import tags
from tools.packages import find


def test_a_tag_names_a_package_and_a_version():
    assert tags.parse("vescale-rng-v0.10.2") == (find("rng"), "0.10.2")


@pytest.mark.parametrize(
    "text",
    ["v0.1.0", "vescale-rng-0.1.0", "vescale-rng-v0.1", "vescale-rng-v0.1.0c1", "rng-v1.0.0"],
)
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="is no release tag"):
        tags.parse(text)


def test_a_pre_release_is_named_by_the_release_that_it_leads_to():
    assert tags.parse("vescale-rng-v0.2.0rc1") == (find("rng"), "0.2.0rc1")
    assert tags.final("0.2.0rc1") == tags.final("0.2.0") == "0.2.0"
    with pytest.raises(ValueError, match="is no version"):
        tags.final("0.2")


def test_nothing_is_compared_with_a_pre_release():
    known = ["vescale-rng-v0.1.0", "vescale-rng-v0.2.0rc1", "vescale-rng-v0.2.0b7"]
    assert tags.last(find("rng"), known) == "vescale-rng-v0.1.0"
    assert tags.last(find("rng"), known[1:]) is None


def test_the_tag_of_the_commit_that_is_checked_out_is_not_before_it(tmp_path, monkeypatch):
    def git(*command):
        options = ["-c", "user.name=x", "-c", "user.email=x@y"]
        subprocess.run(["git", *options, *command], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    for version in ("0.1.0", "0.2.0"):
        git("commit", "--allow-empty", "-qm", version)
        git("tag", f"vescale-rng-v{version}")
    monkeypatch.setattr(tags, "ROOT", tmp_path)
    assert tags.before_head() == ["vescale-rng-v0.1.0"]


@pytest.mark.parametrize("heading", ["0.2.0 (unreleased)", "0.2.0 (2026-01-02)"])
def test_notes_of_a_pre_release_are_those_of_its_release(tmp_path, heading):
    package = SimpleNamespace(folder=tmp_path, name="vescale-rng")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n\n- New.\n")
    assert tags.changes(package, "0.2.0rc1") == "- New."
    if "unreleased" in heading:
        with pytest.raises(ValueError, match="no heading"):
            tags.changes(package, "0.2.0")


def test_an_unknown_package_is_refused():
    with pytest.raises(ValueError, match="no package is called 'vescale-ring'"):
        tags.parse("vescale-ring-v0.1.0")


def test_the_last_tag_is_the_highest_version_not_the_last_in_the_alphabet():
    known = ["vescale-rng-v0.9.0", "vescale-rng-v0.10.0", "vescale-comm-v3.0.0", "other"]
    assert tags.last(find("rng"), known) == "vescale-rng-v0.10.0"
    assert tags.last(find("ckpt"), known) is None


def test_a_tag_of_another_version_than_the_checkout_fails(capsys):
    assert tags.main(["vescale-rng-v99.0.0"]) == 1
    assert "99.0.0" in capsys.readouterr().err


def test_without_a_checkout_of_git_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tags, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(SystemExit, match="git tag, which this asks: fatal: not a git repository"):
        tags.before_head()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=r"git tag, which this asks: .*No such file"):
        tags.before_head()
