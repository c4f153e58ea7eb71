"""The error for a case that did not return on every rank: who raised, hung or died."""

import contextlib
import signal

from vescale_comm._errors import CommError
from vescale_comm._outcome import Failed


class WorkerError(CommError):
    """A function did not return on every rank.

    Attributes:
        failures: what was raised, by rank.
        hung: ranks that had not returned when the time was over.
        died: exit codes (negative: signals) of the workers that ended, by rank.
    """

    def __init__(
        self,
        message: str,
        failures: dict[int, Failed] | None = None,
        hung: tuple[int, ...] = (),
        died: dict[int, int | None] | None = None,
    ) -> None:
        super().__init__(message)
        self.failures = failures or {}
        self.hung = hung
        self.died = died or {}


def raised(what: str, world_size: int, failures: dict[int, Failed]) -> WorkerError:
    """Every rank has answered, and these have raised."""
    head = f"{what} raised on rank(s) {_listed(failures)} of {world_size}"
    return WorkerError("\n\n".join([head, *_sections(failures)]), failures)


def not_ended(
    what: str,
    timeout: float,
    failures: dict[int, Failed],
    stacks: dict[int, str],
    deaths: dict[int, tuple[int | None, str]],
) -> WorkerError:
    """Some rank has not answered, and never will.

    Args:
        what: name of the function.
        timeout: seconds that it was given.
        failures: what ranks raised.
        stacks: where the ranks are that still run.
        deaths: exit codes, and the ends of the logs, of the workers that are gone.
    """
    if deaths:
        head = f"{what}: the worker of rank(s) {_listed(deaths)} died"
    elif failures:
        head = (
            f"{what}: rank(s) {_listed(failures)} raised, while rank(s) {_listed(stacks)} went on "
            "and did not end"
        )
    else:
        head = f"{what}: rank(s) {_listed(stacks)} did not end within {timeout:g} s"
    # Deaths first: what the others raised is mostly their consequence.
    parts = [
        *(f"rank {rank} died ({_how(code)})" + _log(log) for rank, (code, log) in deaths.items()),
        *_sections(failures),
        *(f"rank {rank} hung here:\n{_trimmed(stack)}" for rank, stack in stacks.items()),
    ]
    codes = {rank: code for rank, (code, _) in deaths.items()}
    return WorkerError("\n\n".join([head, *parts]), failures, tuple(stacks), codes)


def _listed(ranks: "dict[int, Failed] | dict[int, str] | dict[int, tuple[int | None, str]]") -> str:
    return ", ".join(map(str, sorted(ranks)))


def _sections(failures: dict[int, Failed]) -> list[str]:
    return [f"rank {rank} raised:\n{each.traceback}" for rank, each in sorted(failures.items())]


def _log(log: str) -> str:
    return f"; the end of its log:\n{log}" if log.strip() else ""


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _trimmed(stacks: str) -> str:
    """Leave out of faulthandler's text what every worker has: our own thread and frames."""
    threads = [text for text in stacks.split("\n\n") if " in _watch_parent" not in text]
    lines = "\n\n".join(threads).splitlines()
    ours = next((i for i, line in enumerate(lines) if "testing/_worker.py" in line), len(lines))
    return "\n".join(lines[:ours])
