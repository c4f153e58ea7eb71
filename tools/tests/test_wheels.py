"""What a wheel or an sdist holds too much or lacks is named."""

import dataclasses
import io
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tools import packages, wheels

INFO = "vescale_rng-0.1.0.dist-info"
WHEEL = {"vescale_rng/_version.py", "vescale_rng/py.typed", f"{INFO}/licenses/LICENSE"}
SDIST = {"src/vescale_rng/_version.py", "src/vescale_rng/py.typed", "tests/test_a.py", "PKG-INFO"}
SDIST |= {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of its own folder with one module and one test; nothing is built."""
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    monkeypatch.setattr(packages, "DIST", tmp_path)
    made = dataclasses.replace(packages.find("rng"))
    for name in ("src/vescale_rng/_version.py", "src/vescale_rng/py.typed", "tests/test_a.py"):
        path = made.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('__version__ = "0.1.0"\n')
    return made


def wheel_faults(package, names):
    with zipfile.ZipFile(package.wheel, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return [*wheels.wheel_faults(package)]


def sdist_faults(package, names):
    with tarfile.open(package.sdist, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"vescale_rng-0.1.0/{name}"), io.BytesIO())
    return [*wheels.sdist_faults(package)]


def test_what_belongs_there_passes(package):
    assert wheel_faults(package, WHEEL) == []
    assert sdist_faults(package, SDIST) == []


@pytest.mark.parametrize("name", sorted(WHEEL))
def test_a_wheel_that_lacks_something(package, name):
    assert wheel_faults(package, WHEEL - {name}) == [f"lacks {name}"]


@pytest.mark.parametrize("name", ["tests/test_a.py", "vescale_comm/x.py"])
def test_a_wheel_with_something_foreign(package, name):
    assert wheel_faults(package, WHEEL | {name}) != []


@pytest.mark.parametrize("name", ["tests/test_a.py", "LICENSE", "CHANGELOG.md", "pyproject.toml"])
def test_an_sdist_that_lacks_something(package, name):
    assert sdist_faults(package, SDIST - {name}) == [f"lacks {name}"]


def test_an_sdist_with_something_foreign(package):
    assert "holds notes" in sdist_faults(package, SDIST | {"notes/x"})[0]


def test_tests_of_one_name_are_told(package):
    (package.tests / "room").mkdir()
    (package.tests / "room" / "test_a.py").write_text("")
    (fault,) = sdist_faults(package, SDIST | {"tests/room/test_a.py"})
    assert fault.endswith("test_a.py")


@pytest.mark.slow
@pytest.mark.parametrize("package", packages.PACKAGES, ids=lambda package: package.short)
def test_whoever_unpacks_an_sdist_can_collect_its_tests(package, tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=package.folder, check=True, capture_output=True)
    tests = wheels.unpack_tests(tmp_path / package.sdist.name, tmp_path / "unpacked")
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "tests"]
    done = subprocess.run(collect, cwd=tests.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_the_digest_sees_names_and_bytes(package):
    before = wheels.digest(package)
    (package.tests / "test_b.py").write_text("")
    named = wheels.digest(package)
    (package.tests / "test_b.py").write_text("x = 1\n")
    assert len({before, named, wheels.digest(package)}) == 3


def test_a_range_that_leaves_out_a_neighbour_is_a_conflict(tmp_path):
    def wheel(name, version, *required):
        path = tmp_path / f"{name}-{version}-py3-none-any.whl"
        lines = [f"Name: {name}", *(f"Requires-Dist: {one}" for one in required)]
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines))
        return path

    above = wheel("vescale_dtensor", "0.1.0", "torch>=2.11", "vescale-rng<0.2,>=0.1")
    assert wheels.conflicts([above, wheel("vescale_rng", "0.1.9")]) == []
    assert wheels.conflicts([above]) == []
    (conflict,) = wheels.conflicts([above, wheel("vescale_rng", "0.2.0")])
    assert "not for 0.2.0" in conflict
