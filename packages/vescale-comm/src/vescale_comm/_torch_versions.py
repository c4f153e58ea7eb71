"""Lists the versions of torch and Python that were tested, and warns of others.

The distributions state no upper bound: with one, pip would install an old release of ours, or
answer with a riddle, where most newer versions work. `__init__` imports this before anything else,
so that the warning comes before what a new torch may break.
"""

import re
import sys
import warnings
from types import FrameType

import torch

OLDEST, NEWEST = (2, 11), (2, 15)
NEWEST_PYTHON = (3, 13)
# What was warned of: packages of vescale import each other, and one warning is enough.
said: list[str] = []


def warn_untested(version: str, python: tuple[int, int] = NEWEST_PYTHON) -> None:
    """Warn once, at the user's import, of a torch or a Python that was not tested."""
    if python > NEWEST_PYTHON:
        newest = ".".join(map(str, NEWEST_PYTHON))
        _warn_once(
            f"Python {python[0]}.{python[1]} is newer than what this release of vescale was tested "
            f"with, Python 3.11 to {newest}. Much may work as it is; where something fails or "
            f"differs, use Python {newest}"
        )
    match = re.match(r"(\d+)\.(\d+)", version)
    # A build without such a number (a private one) is not judged.
    if match is None or OLDEST <= (int(match[1]), int(match[2])) <= NEWEST:
        return
    way = "newer" if (int(match[1]), int(match[2])) > NEWEST else "older"
    oldest, newest = (".".join(map(str, one)) for one in (OLDEST, NEWEST))
    _warn_once(
        f"torch {version} is {way} than what this release of vescale was tested with, torch "
        f"{oldest} to {newest}. Much may work as it is; where something fails or differs, install "
        f"torch {newest}, or the release of vescale for your torch"
    )


def _warn_once(message: str) -> None:
    ours = [one for name, one in list(sys.modules.items()) if name.endswith("._torch_versions")]
    if any(message in getattr(one, "said", ()) for one in ours):
        return
    said.append(message)
    frame = _importer()
    if frame is None:
        warnings.warn(message, stacklevel=1)
        return
    where = str(frame.f_globals.get("__name__"))
    code, line = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(message, UserWarning, code, line, where)


def _importer() -> FrameType | None:
    """The code outside of vescale that imports it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if not name.startswith(("vescale_", "importlib.")):
            return frame
        frame = frame.f_back
    return None


warn_untested(torch.__version__, sys.version_info[:2])
