"""Ask git about this checkout. Standard library only: the noxfile imports it first of all."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.packages import ROOT


def git(*arguments: str, folder: Path = ROOT) -> str:
    """What git prints.

    Raises:
        SystemExit: there is no git here, or this is no checkout of it.
    """
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise SystemExit(f"git {' '.join(arguments)}, which this asks: {said.strip()}") from None
    return done.stdout.strip()
