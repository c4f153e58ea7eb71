"""The one table of what this workspace ships; sessions, contracts and the CI matrix follow from it.

Standard library only: the noxfile imports it before anything is installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PYTHONS = ("3.11", "3.12", "3.13")
TEST_TOOLS = ("pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.8", "hypothesis>=6.100")
MODEL_TOOLS = ("transformers>=5.0",)  # brings the models that nobody adapted
REMOTE_TOOLS = ("s3fs>=2024.2", "moto[server]>=5", "gcsfs>=2024.2", "gcp-storage-emulator>=2022.6")
FRAMEWORK_TOOLS = ("jax[cpu]>=0.4.30",)  # what vescale-rng's examples of other frameworks need
JOB_TOOLS = ("matplotlib>=3.8",)  # what draws the main job's curves

TORCH = "torch>=2.11"
# The newest that was tested: no bound, which would turn newer ones into riddles of a resolver.
# Each package says it again (`_torch_versions`), and warns at its import of any other.
NEWEST_TORCH = "2.15"
NUMPY = "numpy>=1.26"
RNG = "vescale-rng>=0.1,<0.2"
COMM = "vescale-comm>=0.1,<0.2"
DTENSOR = "vescale-dtensor>=0.1,<0.2"
CKPT = "vescale-ckpt>=0.1,<0.2"


@dataclass(frozen=True, eq=False)
class Package:
    """One distribution: what it is called and what it may lean on."""

    name: str
    requires: tuple[str, ...]
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Extras that bring whole trainers of others; of the sessions, only `ecosystem` installs them.
    guests: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # What only its tests import, beyond what it declares itself.
    test_requires: tuple[str, ...] = ()
    # Its modules and subpackages, top to bottom: each imports only those on lines below its own,
    # and none that stands beside it ("_checks | _trace"). Empty: not ordered yet.
    layers: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        """The name within the workspace: `rng`."""
        return self.name.removeprefix("vescale-")

    @property
    def module(self) -> str:
        """The import name: `vescale_rng`."""
        return self.name.replace("-", "_")

    @property
    def folder(self) -> Path:
        """Where its pyproject.toml lies."""
        return ROOT / "packages" / self.name

    @property
    def source(self) -> Path:
        """What goes on the path to import it from the checkout."""
        return self.folder / "src"

    @property
    def tests(self) -> Path:
        """Its tests, which also travel in its sdist."""
        return self.folder / "tests"

    @property
    def version_file(self) -> Path:
        """The single place that says its version."""
        return self.source / self.module / "_version.py"

    @property
    def version(self) -> str:
        """Its version in this checkout."""
        match = re.search(r'__version__ = "([^"]+)"', self.version_file.read_text())
        if match is None:
            raise ValueError(f"{self.version_file}: no line `__version__ = ...`")
        return match[1]

    @property
    def wheel(self) -> Path:
        """The wheel that `nox -s build` makes of this checkout."""
        return DIST / f"{self.module}-{self.version}-py3-none-any.whl"

    @property
    def sdist(self) -> Path:
        """The sdist that `nox -s build` makes of this checkout."""
        return DIST / f"{self.module}-{self.version}.tar.gz"

    @property
    def siblings(self) -> tuple[str, ...]:
        """Names of the packages of this workspace that it cannot do without."""
        return siblings_in(self.requires)

    @property
    def offered(self) -> dict[str, tuple[str, ...]]:
        """All of its extras, as its pyproject.toml declares them."""
        return {**self.extras, **self.guests}

    @property
    def optional_siblings(self) -> tuple[str, ...]:
        """Names of the packages of this workspace that an extra of it brings."""
        return siblings_in(one for extra in self.extras.values() for one in extra)

    @property
    def test_siblings(self) -> tuple[str, ...]:
        """Names of the packages of this workspace that only its tests need."""
        return siblings_in(self.test_requires)


# In dependency order: a package stands below everything that it needs.
PACKAGES = (
    Package(
        "vescale-rng",
        requires=(TORCH, NUMPY),
        extras={"triton": ("triton>=3.6",)},
        test_requires=(COMM,),
        layers=(
            "torch_dtensor",
            "_torch_dtensor",
            "cuda | streams",
            "init | _state",
            "_draw",
            "_portable",
            "_cpu | _cuda",
            "_layout | _distributions | _policy",
            "_arguments",
            "_errors | _torch_versions | _version",
        ),
    ),
    Package(
        "vescale-comm",
        requires=(TORCH, NUMPY),
        extras={"triton": ("triton>=3.6",)},
        layers=(
            "agreement | ddp | fsdp2 | generators | graphs | nested | operators | testing",
            "_simulation",
            "_collectives",
            "_checks | _trace",
            "_engine",
            "_groups | _wire",
            "_watchdog",
            "_torch",
            "_errors | _outcome | _torch_versions | _version",
        ),
    ),
    Package(
        "vescale-dtensor",
        requires=(TORCH, RNG, COMM),
        test_requires=(NUMPY, CKPT),
        layers=(
            "debug | experimental | parallel | state_dict | storage",
            "placement_types | rules",
            "_joint",
            "_capture",
            "_api",
            "_inspect",
            "_ops",
            "_fast_path",
            "_dispatch",
            "_planning",
            "_autograd",
            "_tensor",
            "_redistribute",
            "_layout",
            "_torch",
            "_errors | _torch_versions | _version",
        ),
    ),
    Package(
        "vescale-ckpt",
        requires=(TORCH, NUMPY),
        extras={
            "fast": ("xxhash>=3.4",),
            "fsspec": ("fsspec>=2024.2",),
            "safetensors": ("safetensors>=0.4.3",),
        },
        test_requires=(COMM,),
        layers=(
            "__main__",
            "_cli | dcp",
            "_convert | _dcp | _manager",
            "_inspect",
            "_load | _save",
            "_coordination | _storage",
            "_format",
            "_state",
            "_tensors",
            "_errors | _progress | _torch_versions | _untrusted | _version",
        ),
    ),
    Package(
        "vescale-parallel",
        requires=(TORCH, NUMPY, RNG, COMM, DTENSOR),
        extras={"memory": ("scipy>=1.11",), "train": (CKPT, "rich>=13.7", "tensorboard>=2.16")},
        guests={
            "accelerate": ("accelerate>=1.10", "safetensors>=0.4.3"),
            "lightning": ("lightning>=2.5", "lightning-utilities>=0.10"),
            "transformers": ("accelerate>=1.10", "safetensors>=0.4.3", "transformers>=5.0"),
        },
        layers=(
            "__main__",
            "_cli",
            "cost | graph | memory | schedules",
            "integrations | train",
            "_apply | _data | _pretrained",
            "_plan",
            "_check",
            "_checkpoint | _graph | _invariant | _pipeline | _static",
            "_cost | _deferred | _experts | _local_rows | _memory | _schedules | _zero",
            "_notation | _step",
            "_common",
            "_errors | _torch_versions | _untrusted | _version",
        ),
    ),
)


def project_of(requirement: str) -> str:
    """The project that a requirement names: `numpy` of `numpy>=1.26`."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    if match is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    return match[0].lower()


def torch_versions(requirement: str = TORCH, newest: str = NEWEST_TORCH) -> tuple[str, ...]:
    """The minor versions of torch from the lowest of a requirement to the newest, both included.

    Raises:
        ValueError: the requirement has another form, or its ends are of different major versions.
    """
    match = re.fullmatch(r"torch>=(\d+)\.(\d+) to (\d+)\.(\d+)", f"{requirement} to {newest}")
    if match is None or match[1] != match[3]:
        raise ValueError(f"not of the form torch>=A.B and A.C: {requirement!r} and {newest!r}")
    return tuple(f"{match[1]}.{minor}" for minor in range(int(match[2]), int(match[4]) + 1))


def siblings_in(requirements: Iterable[str]) -> tuple[str, ...]:
    """Those of the named projects that are packages of this workspace."""
    projects = (project_of(one) for one in requirements)
    return tuple(project for project in projects if project.startswith("vescale-"))


def find(name: str) -> Package:
    """The package of that name; its short name and its import name will do."""
    for package in PACKAGES:
        if name in (package.name, package.short, package.module):
            return package
    known = ", ".join(package.short for package in PACKAGES)
    raise ValueError(f"no package is called {name!r}; there are: {known}")


def closure(*packages: Package) -> tuple[Package, ...]:
    """The packages and all that they need of this workspace, in dependency order."""
    wanted = set(packages)
    for package in reversed(PACKAGES):
        if package in wanted:
            wanted.update(find(name) for name in package.siblings)
    return tuple(package for package in PACKAGES if package in wanted)


def closed_sets() -> Iterator[tuple[Package, ...]]:
    """Every set of packages that holds whatever its members need, smaller sets first."""
    for size in range(1, len(PACKAGES) + 1):
        for chosen in combinations(PACKAGES, size):
            if closure(*chosen) == chosen:
                yield chosen


def third_party(
    packages: Iterable[Package] = PACKAGES, *, extras: bool = False, tests: bool = False
) -> list[str]:
    """What the packages require from outside this workspace, each requirement once."""
    found: dict[str, None] = {}
    for package in packages:
        asked = [*package.requires]
        asked += [one for extra in package.extras.values() for one in extra] if extras else []
        asked += package.test_requires if tests else ()
        found.update(dict.fromkeys(one for one in asked if not siblings_in([one])))
    return list(found)


def edges() -> Iterator[tuple[Package, Package]]:
    """Every (package, neighbour it needs) of this workspace, extras included."""
    for package in PACKAGES:
        for name in dict.fromkeys(package.siblings + package.optional_siblings):
            yield package, find(name)
