"""The process of one section: `python -m tools.first_gpu.child`, started by `watch`.

Cases are asked in order as long as there is time. Each is written down when it begins and when it
has ended, so whoever watches knows which one a crash or a hang belongs to.
"""

from __future__ import annotations

import argparse
import faulthandler
import fnmatch
import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.first_gpu import findings
from tools.first_gpu.findings import Finding, append
from tools.first_gpu.paths import use_sources
from tools.packages import ROOT

START_ANEW = 75
"""Exit status of a process whose device fails at everything from now on: the next one goes on."""


def main() -> int:
    """Run a section."""
    # Whoever takes it to hang asks where it is before ending it.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    parser = argparse.ArgumentParser(prog="python -m tools.first_gpu.child", description=__doc__)
    parser.add_argument("section")
    parser.add_argument("--device", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--case", default="*")
    parser.add_argument("--asked", default="[]")
    parser.add_argument("--first", action="append", default=[])
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    use_sources()
    for file in given.first:
        runpy.run_path(file, run_name="first")
    _Section(given.section, given.device, given.file, until).run(
        given.case, set(json.loads(given.asked))
    )
    return 0


class _Section:
    """One run of a section in this process."""

    def __init__(self, name: str, device: str, file: Path, until: float) -> None:
        self.name, self.file, self.until = name, file, until
        self.device_type = device

    def run(self, glob: str, asked: set[str]) -> None:
        """Ask the cases of these names that have not been asked before."""
        import torch

        _settle(self.device_type)
        device = torch.device("cuda:0" if self.device_type == "cuda" else self.device_type)
        module: Any = importlib.import_module(f"tools.first_gpu.sections.{self.name}")
        have = abilities(self.device_type)
        for case in module.cases(device):
            if case.name in asked or not fnmatch.fnmatchcase(case.name, glob):
                continue
            missing = [need for need in case.needs if need not in have]
            if missing:
                self._write(case.name, findings.CANNOT, got=_needed(missing))
            elif time.monotonic() > self.until:
                self._write(case.name, findings.NOT_REACHED)
            else:
                self._write(case.name, findings.BEGUN, seconds=case.patience)
                self._ask(case, device)

    def _ask(self, case: Any, device: Any) -> None:
        start = time.monotonic()
        try:
            found = case.ask(device)
            if device.type == "cuda":
                # What was queued and fails is this case's, and not the next one's.
                import torch

                torch.cuda.synchronize()
        except Exception as error:  # whatever it is: that is what was found
            self._write(
                case.name,
                findings.RAISED,
                expected="no error",
                got=_first_line(error),
                seconds=time.monotonic() - start,
                where=_where(error),
                more="".join(traceback.format_exception(error)),
            )
            if device.type == "cuda" and not _works():
                # A kernel that read where it must not takes the whole context along.
                os._exit(START_ANEW)
        else:
            statuses = {True: findings.FINE, False: findings.DIFFERS, None: findings.MEASURED}
            self._write(
                case.name,
                statuses[found.fine],
                expected=found.expected,
                got=found.got,
                seconds=time.monotonic() - start,
                more=found.more,
            )
        gc.collect()

    def _write(self, case: str, status: str, **what: Any) -> None:
        append(self.file, Finding(section=self.name, case=case, status=status, **what))


def _settle(device_type: str) -> None:
    """What all cases have in common."""
    import torch

    if device_type == "cpu":
        torch.set_num_threads(1)
    else:
        # Convolutions may round float32 to 10 bits by default, which says nothing of ours.
        torch.backends.cudnn.allow_tf32 = False
        torch.cuda.set_device(0)


def _works() -> bool:
    import torch

    try:
        torch.ones(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def abilities(device_type: str) -> set[str]:
    """Which of `NEEDS` this process has."""
    from importlib.util import find_spec

    import torch

    found = set()
    triton = find_spec("triton") is not None
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device_type == "cuda":
        found.add("cuda")
        if triton:
            found |= {"triton gpu", "kernels", "many kernels"}
            if torch.cuda.get_device_capability() >= (8, 9):
                found.add("fp8")
    elif triton and interpreted:
        found.add("kernels")
    if shutil.which("g++") is not None:
        found.add("compiler")
    return found


def _needed(missing: Iterable[str]) -> str:
    from tools.first_gpu.cases import NEEDS

    return "; ".join(NEEDS[need] for need in missing)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    # Of an error that gathers those of ranks, the first line says only which of them raised.
    text = " / ".join(lines[:2]) if lines else ""
    return f"{type(error).__name__}: {text}"[:300]


def _where(error: BaseException) -> str:
    """The innermost line of this checkout: of a package if there is one."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    frames = traceback.extract_tb(root.__traceback__)
    ours = [one for one in frames if Path(one.filename).is_relative_to(ROOT)]
    packages = [one for one in ours if "packages" in Path(one.filename).parts]
    if not ours:
        return ""
    last = (packages or ours)[-1]
    return f"{Path(last.filename).relative_to(ROOT)}:{last.lineno}"


if __name__ == "__main__":
    sys.exit(main())
