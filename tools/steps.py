"""Steps that several nox sessions share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import nox

from tools import release_builds, skips, wheels
from tools.packages import PACKAGES, ROOT, Package, closure, find

# One thread a process: the tests start several, on machines that may have two cores. And what
# the caller's PYTHONPATH offers must not stand in for what is installed.
# torch looks up the name of every address that it connects to, also of ::ffff:127.0.0.1, which no
# hosts file has: a name server that drops a few requests would cost five seconds for each of them.
# Bytecode is kept, in a folder of its own: a process that compiles torch's modules anew takes three
# times as long to start, and the tests start hundreds.
TEST_ENV: Mapping[str, str | None] = {
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": None,
    "PYTHONPYCACHEPREFIX": str(ROOT / ".nox" / "bytecode"),
    "PYTHONPATH": None,
    "RES_OPTIONS": "timeout:1 attempts:3",
}


def python_of(session: nox.Session) -> str:
    """The interpreter of the shared environment: that of the Python that nox is to force."""
    forced = f"-{session.python}".replace(".", "-") if isinstance(session.python, str) else ""
    return str(session.cache_dir.parent.resolve() / f"workspace{forced}" / "bin" / "python")


def installed_at(session: nox.Session) -> list[int]:
    """When the packages were installed into the environment of a session, as file times."""
    place = Path(session.virtualenv.location)
    names = [package.name.replace("-", "_") for package in PACKAGES]
    found = (
        one for name in names for one in place.glob(f"lib/python*/site-packages/{name}-*.dist-info")
    )
    return sorted(one.stat().st_mtime_ns for one in found)


def install(session: nox.Session, constraints: str, *requirements: str) -> None:
    """Install what comes from outside the workspace; GPU compilers stay out of CPU machines."""
    wanted = [one for one in requirements if not one.startswith("triton")]
    # Compiling all of torch to bytecode takes longer than what the sessions then import of it.
    session.install("--no-compile", "-c", constraints, *wanted)


def swap(session: nox.Session, chosen: Sequence[Path]) -> None:
    """Leave exactly these wheels of the workspace installed."""
    names = [package.name for package in PACKAGES]
    session.run("python", "-m", "pip", "uninstall", "-q", "-y", *names, silent=True)
    session.install("--no-index", "--no-deps", *map(str, chosen))
    session.run("python", "-m", "pip", "check", silent=True)


@contextmanager
def elsewhere(session: nox.Session) -> Iterator[None]:
    """Work in an empty folder outside the checkout."""
    with tempfile.TemporaryDirectory() as folder, session.chdir(folder):
        yield


def probe(session: nox.Session, present: Sequence[Package]) -> None:
    """Import every public module of the packages; assert that the others are absent."""
    absent = [package.module for package in PACKAGES if package not in present]
    script = str(ROOT / "tools" / "probe.py")
    modules = [package.module for package in present]
    with elsewhere(session):
        session.run("python", "-I", script, *modules, "--absent", *absent, env=TEST_ENV)


def smoke(session: nox.Session, packages: Sequence[Package], *more: Path) -> None:
    """Run the smoke tests out of the packages' sdists, and those in further folders."""
    with tempfile.TemporaryDirectory() as folder:
        unpacked = [wheels.unpack_tests(package.sdist, Path(folder)) for package in packages]
        # Other test files may import what only the full set of tests needs.
        files = [path for tests in unpacked for path in sorted(tests.rglob("test_*.py"))
                 if "mark.smoke" in path.read_text()]  # fmt: skip
        if not files:
            session.error(f"no test of {packages[0].name} is marked smoke")
        run_tests(session, [*files, *more], "-q", "-m", "smoke", skippable=skips.PARTIAL)


def run_tests(
    session: nox.Session,
    paths: Sequence[Path],
    *arguments: str,
    skippable: Sequence[str] = skips.ALONE,
) -> None:
    """Run tests on what is installed, under the workspace's settings, from outside it."""
    with elsewhere(session):
        run_pytest(session, [*pytest_outside("python", paths), *arguments], skippable=skippable)


def run_pytest(
    session: nox.Session,
    command: Sequence[str],
    *,
    skippable: Sequence[str],
    env: Mapping[str, str | None] = TEST_ENV,
) -> int:
    """Run pytest; fails also if tests were skipped for reasons other than these patterns.

    Returns:
        How many tests ran.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        session.run(*command, f"--junitxml={report}", env=env)
        if not report.exists():  # only asked for help, or for what there is
            return 0
        outcome = skips.read(report)
    session.log(skips.summary(outcome))
    if found := skips.faults(outcome, skippable):
        session.error("this run proves less than it should: " + "; ".join(found))
    return outcome.ran


def pytest_outside(python: str, paths: Sequence[Path]) -> list[str]:
    """A pytest command for any folder to run in; nothing is written beside the tests."""
    # pytest names test modules by their path below the root. From within tests/, the folder
    # `inspect` would take the name of Python's own module.
    root = os.path.commonpath([above_tests(path) for path in paths])
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", root, "-p", "no:cacheprovider"]
    return [python, "-m", "pytest", *settings, *map(str, paths)]


def above_tests(path: Path) -> Path:
    """The folder above the one called `tests` that a path is, or lies in; else above the path."""
    whole = [path, *path.parents]
    tests = next((one for one in whole if one.name == "tests"), path)
    return tests.parent


def run_marked(
    session: nox.Session,
    marker: str,
    paths: Sequence[Path],
    *,
    python: str = "python",
    skippable: Sequence[str] = skips.ALONE,
    **env: str,
) -> None:
    """Run the tests with that marker; there must be some."""
    command = [*pytest_outside(python, paths), "-m", marker]
    variables = {**TEST_ENV, **env}
    with elsewhere(session):
        collect = [*command, "--collect-only", "-q"]
        found = session.run(*collect, silent=True, success_codes=[0, 5], env=variables)
        if "no tests collected" in str(found):
            session.error(f"no test is marked {marker}")
        everything = [*command, *session.posargs]
        run_pytest(session, everything, skippable=skippable, env=variables)


def compare(
    session: nox.Session, package: Package, neighbour: Package, *, old: Package, tag: str | None
) -> bool:
    """Run the package's tests with one of the two at its last release, the other at HEAD.

    Returns:
        Whether that can be: it has been released, and ranges of versions admit the pair.
    """
    if tag is None:
        return False
    wheel, sdist = release_builds.artifacts(old, tag)
    needed = [find(name) for name in package.test_siblings + package.optional_siblings]
    chosen = [wheel if one is old else one.wheel for one in closure(package, neighbour, *needed)]
    title = f"{package.short} with {neighbour.short}; {old.short} as in {tag}"
    if conflicts := wheels.conflicts(chosen):
        # A range that leaves the pair out makes no promise about it.
        session.warn(f"{title}: left out, {conflicts[0]}")
        return False
    session.log(title)
    swap(session, chosen)
    with tempfile.TemporaryDirectory() as folder:
        source = sdist if old is package else package.sdist
        tests = wheels.unpack_tests(source, Path(folder))
        run_tests(session, [tests], *session.posargs, skippable=skips.PARTIAL)
    return True
