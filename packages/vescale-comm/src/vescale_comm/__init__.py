"""Collectives that are typed, fused, ordered, compressed, traced and simulated."""

from vescale_comm._broadcast import barrier, broadcast
from vescale_comm._bucket import Bucket, Buffer, all_reduce_bucketed
from vescale_comm._emulator import Emulator
from vescale_comm._errors import (
    CollectiveError,
    CommArgumentError,
    CommError,
    CommMismatchError,
    CommTimeoutError,
    DeadlockError,
)
from vescale_comm._exchange import all_to_all
from vescale_comm._fold import Order
from vescale_comm._formats import Feedback, Wire
from vescale_comm._gather import all_gather, gather_pieces
from vescale_comm._group import Group, GroupLike, as_group
from vescale_comm._mesh import group_of
from vescale_comm._pending import Pending, UnwaitedWarning, unwaited
from vescale_comm._reduce import all_reduce
from vescale_comm._scatter import reduce_scatter
from vescale_comm._simulate import Simulation, SimulationError, simulate
from vescale_comm._trace import Record, Trace, count, merge, trace
from vescale_comm._version import __version__

__all__ = [
    "Bucket",
    "Buffer",
    "CollectiveError",
    "CommArgumentError",
    "CommError",
    "CommMismatchError",
    "CommTimeoutError",
    "DeadlockError",
    "Emulator",
    "Feedback",
    "Group",
    "GroupLike",
    "Order",
    "Pending",
    "Record",
    "Trace",
    "Simulation",
    "SimulationError",
    "UnwaitedWarning",
    "Wire",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_reduce_bucketed",
    "all_to_all",
    "as_group",
    "barrier",
    "broadcast",
    "count",
    "gather_pieces",
    "group_of",
    "merge",
    "reduce_scatter",
    "simulate",
    "trace",
    "unwaited",
]
