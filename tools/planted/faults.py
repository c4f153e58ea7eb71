"""The table of faults: what is planted where, by which rule, and which tests are to find it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from tools.packages import PACKAGES, Package, find

TABLES = Path(__file__).parent
# What a fault does to the code that it is planted in.
RULES = {
    "sign": "a sign, a comparison or a condition turned around",
    "reduction": "a reduction left out, done twice, or of another kind",
    "offset": "an index, a size or an edge that is off, mostly by one",
    "dim": "another dim, axis, rank or group than the right one",
    "guard": "an error that is no longer raised",
    "cast": "a dtype or a device that is not what it should be",
    "wait": "nobody waits: for a transfer, a thread, other ranks, or the disk",
    "order": "two things in the wrong order",
    "state": "state that is not kept, not restored, or shared where it must not be",
    "key": "a key of a cache that leaves out what its value hangs on",
}
# No rooms of their own, or none that can be tested without a GPU and a compiler for one.
SPARED = ("_cuda", "_cuda/kernels")


@dataclass(frozen=True)
class Fault:
    """One text of one file that becomes another."""

    package: Package
    name: str
    rule: str
    file: str
    old: str
    new: str
    # Files and folders below the package's `tests`, likeliest first: they run in this order.
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The subpackage that the file lies in, or the module that stands in none."""
        folder = Path(self.file).parent.as_posix()
        return Path(self.file).stem if folder == "." else folder

    @property
    def path(self) -> Path:
        """The file, from the folder that holds all sources."""
        return Path(self.package.module, self.file)

    def planted(self, text: str) -> str:
        """Return the file's text with the fault in it.

        Raises:
            ValueError: the old text is not there exactly once, or becomes itself.
        """
        if (found := text.count(self.old)) != 1 or self.old == self.new:
            place = f"{self.package.short}: {self.name}: {self.file}"
            raise ValueError(f"{place}: the old text is there {found} times, and must be once")
        return text.replace(self.old, self.new)


def faults(package: Package) -> list[Fault]:
    """Return the faults of a package, as its table lists them."""
    table = TABLES / f"{package.short}.toml"
    entries = tomllib.loads(table.read_text(encoding="utf-8"))["fault"]
    return [Fault(package, **{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def all_faults() -> list[Fault]:
    """Return the faults of all packages, lowest package first."""
    return [fault for package in PACKAGES for fault in faults(package)]


def chosen(packages: list[str], rooms: list[str], names: list[str]) -> list[Fault]:
    """Return the faults of these packages and rooms, of these names; an empty list chooses all.

    Raises:
        ValueError: nothing is called so.
    """
    known = all_faults()
    wanted = [find(name) for name in packages]
    for asked, there in (
        (rooms, {one.room for one in known}),
        (names, {one.name for one in known}),
    ):
        if unknown := set(asked) - there:
            raise ValueError(f"no fault is there of {', '.join(sorted(unknown))}")
    return [
        fault
        for fault in known
        if (not wanted or fault.package in wanted)
        and (not rooms or fault.room in rooms)
        and (not names or fault.name in names)
    ]


def rooms(package: Package) -> list[str]:
    """Return the subpackages of a package that hold code, but for those that are spared."""
    top = package.source / package.module
    found = [folder.parent.relative_to(top).as_posix() for folder in top.rglob("__init__.py")]
    return sorted(set(found) - {".", *SPARED})
