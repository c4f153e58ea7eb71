"""Build what is out of date in dist/, and check what an sdist and a wheel hold.

The wheel is built from the sdist, so the sdist is proven complete; a digest of the sources
beside the artifacts says when nothing has to be built again.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path

from tools.packages import DIST, PACKAGES, Package, find

DIGESTS = DIST / "digests.json"
SDIST_FILES = {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "PKG-INFO"}
# Benchmarks travel where tests run them; hatchling adds .gitignore by itself.
# `docs`: pages whose examples tests run. `vectors`: what an implementation in another language is
# tested against; `faults`: what is done to checkpoints, which tests and a session run; `opinfo`:
# the sweep of torch's operator database, whose modules tests import.
SDIST_TOP = SDIST_FILES | {"src", "tests", "benchmarks", "docs", "faults", "opinfo", "vectors"}
SDIST_TOP |= {".gitignore"}


def sources(package: Package) -> list[Path]:
    """The files of the checkout that its artifacts are made of."""
    inside = (path.relative_to(package.folder) for path in package.folder.rglob("*"))
    # Caches and what editors hide are no sources.
    kept = (path for path in inside if not path.parts[0].startswith("."))
    kept = (path for path in kept if not {"__pycache__", ".hypothesis"} & {*path.parts})
    return sorted(package.folder / path for path in kept if (package.folder / path).is_file())


def digest(package: Package) -> str:
    """One value for the names and bytes of its sources."""
    total = hashlib.sha256()
    for path in sources(package):
        total.update(f"{path.relative_to(package.folder)}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def make(folder: Path, target: Path) -> None:
    """Make the sdist of the package in that folder, and the wheel from that sdist."""
    # Without --sdist or --wheel, `build` takes the sdist that it made for the wheel.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target)]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{folder.name} does not build:\n{done.stdout}{done.stderr}")


def build(packages: Sequence[Package]) -> None:
    """Bring the artifacts in dist/ up to date with the checkout."""
    digests = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    for package in packages:
        now = digest(package)
        if digests.get(package.name) == now and package.wheel.exists() and package.sdist.exists():
            print(f"{package.name} {package.version}: up to date")
            continue
        for old in DIST.glob(f"{package.module}-*"):
            old.unlink()
        make(package.folder, DIST)
        digests[package.name] = now
        DIGESTS.write_text(json.dumps(digests, indent=2) + "\n")
        print(f"{package.name} {package.version}: built")


def metadata(wheel: Path) -> Message:
    """The METADATA of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def conflicts(chosen: Sequence[Path]) -> list[str]:
    """Where one of these wheels declares a range that leaves out another of them."""
    from packaging.requirements import Requirement

    versions = {wheel.name.split("-")[0]: wheel.name.split("-")[1] for wheel in chosen}
    found = []
    for wheel in chosen:
        for one in metadata(wheel).get_all("Requires-Dist", []):
            wanted = Requirement(one)
            version = versions.get(wanted.name.replace("-", "_"))
            # A candidate counts, as it does for pip: who built this wheel asked for it.
            if version is not None and not wanted.specifier.contains(version, prereleases=True):
                found.append(f"{wheel.name} asks for {one}, not for {version}")
    return found


def sdist_names(sdist: Path) -> set[str]:
    """The files of an sdist, relative to its one folder."""
    with tarfile.open(sdist) as archive:
        names = [member.name for member in archive.getmembers() if member.isfile()]
    return {name.split("/", 1)[1] for name in names}


def unpack_tests(sdist: Path, target: Path) -> Path:
    """Unpack an sdist below `target`; returns the folder of its tests."""
    with tarfile.open(sdist) as archive:
        # Safely where Python knows how: 3.11 below .4, as Debian has it, takes no `filter`.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        # All of it: tests read the documents and scripts that lie beside them.
        archive.extractall(target)
    return target / sdist.name.removesuffix(".tar.gz") / "tests"


def wheel_faults(package: Package) -> Iterator[str]:
    """What is wrong with its wheel, in words."""
    with zipfile.ZipFile(package.wheel) as archive:
        names = set(archive.namelist())
    info = f"{package.module}-{package.version}.dist-info/"
    for name in sorted(names):
        if not name.startswith((f"{package.module}/", info)):
            yield f"holds {name}, which is outside {package.module}/"
        if "tests" in Path(name).parts:
            yield f"holds a test: {name}"
    expected = {path.relative_to(package.source).as_posix() for path in sources(package)
                if path.is_relative_to(package.source)}  # fmt: skip
    for name in sorted(expected | {f"{package.module}/py.typed", f"{info}licenses/LICENSE"}):
        if name not in names:
            yield f"lacks {name}"


def sdist_faults(package: Package) -> Iterator[str]:
    """What is wrong with its sdist, in words."""
    names = sdist_names(package.sdist)
    for top in sorted({name.split("/", 1)[0] for name in names} - SDIST_TOP):
        if not top.endswith(".md"):
            yield f"holds {top}, which no user of it needs"
    ours = {path.relative_to(package.folder).as_posix() for path in sources(package)}
    tests = {name for name in ours if name.startswith("tests/")}
    if not tests:
        yield "holds no tests: the package has none"
    # Whoever runs them without this workspace's settings imports them as `test_name`.
    counted = Counter(Path(name).name for name in tests if Path(name).name.startswith("test_"))
    for name in sorted(name for name, times in counted.items() if times > 1):
        yield f"has several files of tests that are called {name}"
    documents = {name for name in ours if name.endswith(".md") and "/" not in name}
    for name in sorted(tests | documents | SDIST_FILES):
        if name not in names:
            yield f"lacks {name}"


def check(packages: Sequence[Package]) -> int:
    """Print what each artifact holds or lacks; returns how many faults there are."""
    total = 0
    for package in packages:
        faults = [f"{package.wheel.name} {fault}" for fault in wheel_faults(package)]
        faults += [f"{package.sdist.name} {fault}" for fault in sdist_faults(package)]
        size = package.wheel.stat().st_size / 1024
        print(f"{package.wheel.name}: {size:.0f} KiB, {len(faults)} faults")
        print("".join(f"  {fault}\n" for fault in faults), end="")
        total += len(faults)
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=__doc__)
    parser.add_argument("packages", nargs="*", help="names; all without")
    parser.add_argument("--check-only", action="store_true", help="build nothing")
    options = parser.parse_args(arguments)
    packages = [find(name) for name in options.packages] or list(PACKAGES)
    DIST.mkdir(exist_ok=True)
    with (DIST / ".lock").open("w") as lock:  # two sessions may want it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not options.check_only:
            build(packages)
        return 1 if check(packages) else 0


if __name__ == "__main__":
    sys.exit(main())
