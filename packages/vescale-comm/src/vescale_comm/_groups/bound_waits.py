"""`bound_waits()`: bound how long a collective waits, and when it reports what it waits for."""

from datetime import timedelta

from vescale_comm._errors import CommArgumentError
from vescale_comm._groups.new_group import use_timeout
from vescale_comm._torch.compat import process_groups, set_group_timeout
from vescale_comm._watchdog.current_watcher import current, own_logs, start
from vescale_comm._watchdog.watcher import REPORT_AFTER

DEFAULT_TIMEOUT = 600.0
"""Seconds: ten minutes, torch's own default for NCCL.

Longer than what one rank does alone in an ordinary program (a large checkpoint, the first batch of
a data set, a compilation), and short enough that a job that hangs at night has ended by morning.
Who waits is told after `report_after` already.
"""


def bound_waits(
    *,
    timeout: float = DEFAULT_TIMEOUT,
    report_after: float = REPORT_AFTER,
    compare: bool = True,
) -> None:
    """Bound the time that a collective waits, and say what it waits for long before that.

    Changes every process group that this process is in, and those that `group_of` makes later. Call
    it on every rank, after the meshes are made. Reports need no call: without one they come after
    30 seconds, and a wait ends after the timeout that its group was made with.

    After `report_after` seconds without progress every rank logs (logger `vescale_comm`, a warning)
    which ranks wait in which collective at which line, who is missing, and where those are. When
    the timeout ends the wait, the error says the same.

    What the ranks of a group execute together is recorded, and compared over the store beside the
    program: no collective is added. Ranks that diverge raise `CommMismatchError`, which names
    the first call that differs, with the line of each rank.

    A rank that waits for others to make a process group (`new_group`, torch's `DeviceMesh`) waits
    in C++ by torch's own timeout: such a process is ended, with the same words, after this one.

    Args:
        timeout: seconds after which a collective raises `CommTimeoutError`.
        report_after: seconds after which ranks say where they are; `float("inf")` for never.
        compare: whether what ranks execute is compared; the same on every rank, at the same point.

    Raises:
        CommArgumentError: a time that is not positive, or a timeout that is infinite.

    Examples:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        bound_waits(timeout=3600)  # rank 0 prepares data for up to an hour
    """
    for name, value in (("timeout", timeout), ("report_after", report_after)):
        if not value > 0:
            raise CommArgumentError(f"bound_waits: {name} is {value} s; it has to be positive")
    if timeout == float("inf"):
        raise CommArgumentError("bound_waits: torch bounds every wait: timeout is a finite number")
    use_timeout(timedelta(seconds=timeout))
    for process_group in process_groups():
        set_group_timeout(process_group, timedelta(seconds=timeout))
    start()
    own = own_logs()
    if own is not None:
        own.enable(compare)
    watcher = current()
    # None in a simulation and in a world of one rank, where no rank waits.
    if watcher is not None:
        watcher.report_after, watcher.timeout = report_after, timeout
        if watcher.comparison is not None:
            watcher.comparison.enabled = compare
            watcher.comparison.bound_waits(timeout)
        watcher.wake()
