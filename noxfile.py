"""Everything that can be done in this workspace; `python -m nox -l` lists it.

Needs nox and the standard library only. What there is to install, isolate and combine is read
from tools/packages.py. Sessions that use the packages from the checkout share one environment
(`workspace`), so that the second of them starts at once; sessions that prove something about
wheels use dist/, which `build` brings up to date, and environments of their own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from tools import parts, skips, tags  # noqa: E402
from tools.packages import (  # noqa: E402
    FRAMEWORK_TOOLS,
    JOB_TOOLS,
    MODEL_TOOLS,
    PACKAGES,
    REMOTE_TOOLS,
    TEST_TOOLS,
    Package,
    closed_sets,
    closure,
    edges,
    third_party,
    torch_versions,
)
from tools.steps import (  # noqa: E402
    TEST_ENV,
    compare,
    install,
    installed_at,
    probe,
    python_of,
    run_marked,
    run_pytest,
    run_tests,
    smoke,
    swap,
)

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"

CONSTRAINTS = str(ROOT / "tools" / "constraints.txt")
BUILD_TOOLS = ("build", "hatchling>=1.26")
# As many processes as there are cores, up to four: each has pools of ranks of its own. Tests of one
# file stay together, since they share what is costly to make; files begin in the order of names, as
# one of few long cases would else come last, with a process alone.
SIDE_BY_SIDE = ("-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder")
LEFT_OUT = ("-p", "tools.omitted_cases")
# What may be skipped where Hugging Face's models are installed.
OTHERS = skips.ANYWHERE + skips.KERNELS + skips.GUESTS
TESTS = [*(package.tests for package in PACKAGES), ROOT / "tests-integration"]
ONE_EACH = nox.parametrize("package", [nox.param(one, id=one.short) for one in PACKAGES])


# --- The two commands of the README


@nox.session(requires=["workspace"], venv_backend="none", tags=["ci"], default=False)
def train(session: nox.Session) -> None:
    """Train the example model on a mesh and on one device, and compare the two."""
    session.run(python_of(session), "-m", "tools.compare", *session.posargs)


@nox.session(requires=["workspace"], venv_backend="none", tags=["ci", "each-python"])
def tests(session: nox.Session) -> None:
    """Run the core of every package's tests; arguments after -- go to pytest."""
    command = [python_of(session), "-m", "pytest", *SIDE_BY_SIDE, *LEFT_OUT, *session.posargs]
    run_pytest(session, command, skippable=skips.ALONE)


@nox.session(requires=["workspace"], venv_backend="none", tags=["ci"], default=False)
def integration(session: nox.Session) -> None:
    """Run the tests that span packages; arguments after -- go to pytest."""
    command = [python_of(session), "-m", "pytest", "tests-integration", *session.posargs]
    run_pytest(session, command, skippable=skips.ALONE)


@nox.session(requires=["build"], reuse_venv=True, tags=["nightly"], default=False)
def all_parts(session: nox.Session) -> None:
    """Run what is not in the core: all, or part `-- 3/12`; tools/parts.txt says which ran."""
    others = (*TEST_TOOLS, *MODEL_TOOLS, "nox")  # tests of the tools import nox
    install(session, CONSTRAINTS, *third_party(extras=True, tests=True), *others)
    swap(session, [package.wheel for package in PACKAGES])
    folders = [*map(str, TESTS), "tools/tests"]
    command = ["python", "-m", "pytest", *SIDE_BY_SIDE, *LEFT_OUT, *folders]
    for part in map(parts.parse_part, session.posargs or map(str, parts.EVERY)):
        began = time.monotonic()
        chosen = ["-m", " or ".join(parts.MARKS), "--part", str(part)]
        ran = run_pytest(session, [*command, *chosen], skippable=OTHERS)
        session.log(parts.record_green(part, ran, (time.monotonic() - began) / 60))


@nox.session(requires=["build"], reuse_venv=True, tags=["ci"], default=False)
def models(session: nox.Session) -> None:
    """Train unmodified Hugging Face models; with `-- -m models` all of them (an hour)."""
    install(session, CONSTRAINTS, *third_party(extras=True, tests=True), *TEST_TOOLS, *MODEL_TOOLS)
    swap(session, [package.wheel for package in PACKAGES])
    run_marked(session, "models and not slow", TESTS, skippable=OTHERS)


@nox.session(requires=["build"], reuse_venv=True, tags=["ci"], default=False)
def remote(session: nox.Session) -> None:
    """Save to and load from local servers that speak S3 and Google Cloud Storage."""
    install(session, CONSTRAINTS, *third_party(extras=True, tests=True), *TEST_TOOLS, *REMOTE_TOOLS)
    swap(session, [package.wheel for package in PACKAGES])
    folder = ROOT / "packages" / "vescale-ckpt" / "tests" / "storage"
    run_tests(session, [folder], *session.posargs, skippable=skips.ANYWHERE)


@nox.session(requires=["build"], reuse_venv=True, tags=["ci"], default=False)
def frameworks(session: nox.Session) -> None:
    """Run the examples of vescale-rng in JAX and numpy."""
    tools = (*TEST_TOOLS, *FRAMEWORK_TOOLS)
    install(session, CONSTRAINTS, *third_party(extras=True, tests=True), *tools)
    swap(session, [package.wheel for package in PACKAGES])
    folder = ROOT / "packages" / "vescale-rng" / "tests" / "frameworks"
    run_tests(session, [folder], *session.posargs, skippable=skips.ANYWHERE)


@nox.session(requires=["build"], reuse_venv=True, tags=["nightly"], default=False)
def ecosystem(session: nox.Session) -> None:
    """Train with other people's libraries, and write ECOSYSTEM.md; `-- LIBRARY...` some of them."""
    known = ROOT / "tools" / "ecosystem.txt"
    libraries = [one for one in known.read_text().split("\n") if one and not one.startswith("#")]
    install(session, str(known), *third_party(extras=True, tests=True), *TEST_TOOLS, *libraries)
    swap(session, [package.wheel for package in PACKAGES])
    folder = ROOT / "tests-integration"
    session.run("python", str(folder / "ecosystem_table.py"), *session.posargs, env=TEST_ENV)
    if not session.posargs:
        names = ("test_ecosystem.py", "test_trainer_offload.py", "test_trainer_recipes.py")
        run_tests(session, [folder / one for one in names], skippable=skips.ANYWHERE)


# --- The code


@nox.session(reuse_venv=True, tags=["ci"])
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    session.install("-c", CONSTRAINTS, "ruff")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")


@nox.session(requires=["workspace"], venv_backend="none", tags=["ci"])
def types(session: nox.Session) -> None:
    """Check the types of all sources with mypy, strictly."""
    sources = [str(package.source) for package in PACKAGES]
    env = {"MYPYPATH": os.pathsep.join(sources)}
    ours = [*sources, "tools", "noxfile.py", "--exclude", "tools/tests"]
    command = [python_of(session), "-m", "mypy", *ours]
    session.run(*command, *session.posargs, env=env)


@nox.session(requires=["build"], reuse_venv=True, tags=["ci"])
def contracts(session: nox.Session) -> None:
    """Prove that packages import only what they declare, and nothing private."""
    session.install("-c", CONSTRAINTS, "import-linter", "packaging")
    session.run("python", "-m", "tools.contracts", *session.posargs)


@nox.session(reuse_venv=True, tags=["ci"], default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation site into runs/docs/site, strictly; `-- --serve` watches it."""
    session.install("-c", CONSTRAINTS, "mkdocs-material", "mkdocstrings[python]")
    session.run("python", "-m", "tools.figures", "--check")
    session.run("python", "-m", "tools.docs", *session.posargs)


@nox.session(reuse_venv=True, tags=["ci"], default=False)
def workflows(session: nox.Session) -> None:
    """Check .github: schemas, security (zizmor), and each command in a dry run."""
    session.install("-c", CONSTRAINTS, "check-jsonschema", "nox", "pyyaml", "zizmor")
    files = sorted(map(str, (ROOT / ".github" / "workflows").glob("*.yml")))
    schema = ["check-jsonschema", "--builtin-schema"]
    session.run(*schema, "vendor.github-workflows", *files)
    session.run(*schema, "vendor.dependabot", str(ROOT / ".github" / "dependabot.yml"))
    session.run("zizmor", "--offline", "--quiet", ".github")
    session.run("python", "-m", "tools.workflows")


# --- The wheels


@nox.session(reuse_venv=True, default=False)
def build(session: nox.Session) -> None:
    """Build sdists, wheels from the sdists, and check what they hold."""
    session.install("-c", CONSTRAINTS, *BUILD_TOOLS)
    session.run("python", "-m", "tools.wheels")


@nox.session(requires=["build"], tags=["ci"], default=False)
@ONE_EACH
def isolated(session: nox.Session, package: Package) -> None:
    """Install one wheel with only what it declares; import all, run smoke tests."""
    present = closure(package)
    install(session, CONSTRAINTS, *(str(one.wheel) for one in present))
    probe(session, present)
    # Only now, so that no test tool can stand in for an undeclared dependency.
    session.install("-c", CONSTRAINTS, *TEST_TOOLS)
    smoke(session, [package])
    shutil.rmtree(session.virtualenv.location)  # it proved its point, and holds a whole torch


@nox.session(requires=["build"], reuse_venv=True, tags=["ci"], default=False)
def subsets(session: nox.Session) -> None:
    """Install every dependency-closed set of wheels; import all, run smoke tests."""
    install(session, CONSTRAINTS, *third_party(), *TEST_TOOLS)
    for present in closed_sets():
        session.log(f"only {', '.join(package.short for package in present)}")
        swap(session, [package.wheel for package in present])
        probe(session, present)
        smoke(session, present, ROOT / "tests-integration")


@nox.session(requires=["build"], tags=["ci"], default=False)
def floors(session: nox.Session) -> None:
    """Run all tests on the lowest declared versions that can be had here."""
    session.install("packaging")
    lowest = ROOT / "runs" / "floors.txt"
    session.run("python", "-m", "tools.floors", str(lowest))
    install(session, str(lowest), *third_party(extras=True, tests=True), *TEST_TOOLS)
    swap(session, [package.wheel for package in PACKAGES])
    folders = [package.tests for package in PACKAGES]
    # Old releases of others use what still others have deprecated since: not ours to fix.
    run_tests(session, folders, "-W", "default::DeprecationWarning", *session.posargs)


@nox.session(requires=["build"], reuse_venv=True, tags=["nightly"], default=False)
@nox.parametrize("version", [nox.param(one, id=one) for one in torch_versions()])
def torches(session: nox.Session, version: str) -> None:
    """Run the tests on one declared torch: nox -s "torches(2.14)" -- [FOLDER...] [-k NAME]."""
    wanted = ROOT / "runs" / "torch.txt"  # not the constraints, which pin another torch
    wanted.parent.mkdir(exist_ok=True)
    wanted.write_text(f"torch=={version}.*\n")
    install(session, str(wanted), *third_party(extras=True, tests=True), *TEST_TOOLS)
    swap(session, [package.wheel for package in PACKAGES])
    # They run from another folder: what is named by its place in this one is named in full.
    named = [ROOT / one for one in session.posargs if (ROOT / one.split("::")[0]).exists()]
    options = [one for one in session.posargs if not (ROOT / one.split("::")[0]).exists()]
    run_tests(session, named or [package.tests for package in PACKAGES], *options)


@nox.session(requires=["build"], tags=["ci"], default=False)
def compat(session: nox.Session) -> None:
    """Run each package against the last release of its neighbours, both ways."""
    before = tags.before_head()
    known = {package: tags.last(package, before) for package in PACKAGES}
    for package in PACKAGES:
        if known[package] is None:
            session.warn(f"{package.name} is left out: it has no tag {package.name}-v* yet")
    if not any(known.values()):
        session.skip("no package has been released yet, so there is nothing to compare with")
    install(session, CONSTRAINTS, *third_party(tests=True), *TEST_TOOLS, *BUILD_TOOLS)
    session.run("python", "-m", "tools.release_builds")
    ran = [
        compare(session, package, neighbour, old=old, tag=known[old])
        for package, neighbour in edges()
        for old in (neighbour, package)
    ]
    said = f"{sum(ran)} of {len(ran)} pairs were compared"
    if not any(ran):
        session.error(f"{said}: no range of versions admits what was released last")
    session.log(said)


# --- Devices and figures


@nox.session(requires=["build"], reuse_venv=True, default=False)
def gpu(session: nox.Session) -> None:
    """Run tests of GPUs and kernels on wheels, then `tools.first_gpu` (skips without a GPU)."""
    if shutil.which("nvidia-smi") is None:
        session.skip("this machine has no NVIDIA driver: nvidia-smi is not there")
    install(session, CONSTRAINTS, *third_party(extras=True, tests=True), *TEST_TOOLS)
    swap(session, [package.wheel for package in PACKAGES])
    # Compiled, and not interpreted, whatever the shell says.
    allowed = skips.NATURE + skips.FEWER + skips.INTERPRETED
    marker = "gpu or multigpu or kernels"
    try:
        run_marked(session, marker, TESTS, skippable=allowed, TRITON_INTERPRET="0")
    finally:
        asked = ["--device", "cuda", "--minutes", "20"]
        session.run("python", "-m", "tools.first_gpu", *asked, env=TEST_ENV)


@nox.session(requires=["workspace"], venv_backend="none", tags=["ci"], default=False)
def first_gpu(session: nox.Session) -> None:
    """Ask a GPU everything that only it can tell; without one a minute of it, on the CPU."""
    asked = session.posargs or ([] if shutil.which("nvidia-smi") else ["--minutes", "1"])
    session.run(python_of(session), "-m", "tools.first_gpu", *asked, env=TEST_ENV)


@nox.session(requires=["build"], reuse_venv=True, tags=["ci"], default=False)
def kernels_interpret(session: nox.Session) -> None:
    """Run the Triton kernels' tests on the CPU, interpreted."""
    if not sys.platform.startswith("linux"):
        session.skip("triton has releases for Linux only")
    install(session, CONSTRAINTS, *third_party(extras=True, tests=True), *TEST_TOOLS)
    session.install(
        "-c", CONSTRAINTS, *(one for one in third_party(extras=True) if "triton" in one)
    )
    swap(session, [package.wheel for package in PACKAGES])
    paths = [*(package.tests for package in PACKAGES), ROOT / "tools/tests/test_first_gpu.py"]
    run_marked(session, "kernels", paths, skippable=skips.ANYWHERE, TRITON_INTERPRET="1")


@nox.session(requires=["workspace"], venv_backend="none", tags=["nightly"], default=False)
def fuzz(session: nox.Session) -> None:
    """Run random programs beside one device: `-- --minutes 10 --seed 0`; `--help` says more."""
    folder = ROOT / "packages" / "vescale-dtensor" / "tests" / "programs"
    session.run(python_of(session), str(folder), *session.posargs, env=TEST_ENV)


@nox.session(requires=["workspace"], venv_backend="none", default=False)
def crash(session: nox.Session) -> None:
    """Make every fault happen to checkpoints, ours and others'; writes FAULTS.md."""
    package, rival = ROOT / "packages" / "vescale-ckpt", ROOT / "runs" / "rivals"
    pip = [python_of(session), "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
    # The table says so if it is not there: it is no dependency of anything here.
    session.run(*pip, "--target", str(rival), "torch_checkpointing", success_codes=[0, 1])
    outputs = ["--out", str(package / "FAULTS.md"), "--json", str(ROOT / "runs" / "faults.json")]
    command = [python_of(session), str(package / "faults"), *outputs, *session.posargs]
    session.run(*command, env={**TEST_ENV, "PYTHONPATH": str(rival)})


@nox.session(requires=["workspace"], venv_backend="none", default=False)
def planted(session: nox.Session) -> None:
    """Plant faults in the sources, and say which the core finds; `-- --room _zero` some of them."""
    session.run(python_of(session), "-m", "tools.planted", *session.posargs, env=TEST_ENV)


@nox.session(requires=["workspace"], venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """Measure ratios to plain torch: nox -s bench -- NAME (without: list them)."""
    env = {}
    if "models" in session.posargs:
        # Beside the workspace, whose tests are to run without.
        folder = ROOT / "runs" / "model-tools"
        env["PYTHONPATH"] = str(folder)
        if not folder.exists():
            pip = [python_of(session), "-m", "pip", "install", "-q", "-c", CONSTRAINTS]
            session.run(*pip, "--target", str(folder), *MODEL_TOOLS)
    session.run(python_of(session), "-m", "tools.bench", *session.posargs, env=env)


# --- What the others stand on


@nox.session(reuse_venv=True, default=False)
def workspace(session: nox.Session) -> None:
    """Set up the shared environment: all packages editable, with their extras."""
    declared = [path for one in PACKAGES for path in (one.folder / "pyproject.toml",
                one.version_file)]  # fmt: skip
    inputs = [Path(__file__), Path(CONSTRAINTS), ROOT / "tools" / "packages.py", *declared]
    # Of this checkout: an environment that was copied with another one imports the sources there.
    content = [str(ROOT).encode(), *(path.read_bytes() for path in inputs)]
    wanted = hashlib.sha256(b"".join(content)).hexdigest()
    stamp = Path(session.virtualenv.location, "workspace.stamp")
    if stamp.exists() and stamp.read_text() == wanted:
        session.log("up to date")
        return
    # What fails half-way, or is left out (nox -R), is up to date with nothing.
    stamp.unlink(missing_ok=True)
    before = installed_at(session)
    tools = [*TEST_TOOLS, *BUILD_TOOLS, *JOB_TOOLS, "editables", "import-linter", "mypy", "nox"]
    install(session, CONSTRAINTS, *third_party(extras=True, tests=True), *tools)
    editable = [argument for one in PACKAGES for argument in ("-e", str(one.folder))]
    session.install("--no-deps", "--no-build-isolation", *editable)
    session.run("python", "-m", "pip", "check", silent=True)
    if installed_at(session) != before:
        stamp.write_text(wanted)


@nox.session(python=False, default=False)
def matrix(session: nox.Session) -> None:
    """Print the sessions that CI runs, as the JSON that the workflow reads."""
    tagged = ["-t", "ci", "nightly"]  # without tags nox lists only what it runs by default
    command = [sys.executable, "-m", "nox", "-f", __file__, "-l", "--json", *tagged]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    command = [sys.executable, "-m", "tools.matrix", *session.posargs]
    subprocess.run(command, check=True, input=listed, text=True, cwd=ROOT)
