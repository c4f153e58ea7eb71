"""Collectives that are typed, fused, ordered, compressed, traced and simulated."""

from vescale_comm._agree import checked
from vescale_comm._broadcast import barrier, broadcast
from vescale_comm._bucket import Bucket, Buffer
from vescale_comm._bucketed import Reducer, all_reduce_bucketed, gather_ahead
from vescale_comm._chaos import Died, Fault, chaos
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
from vescale_comm._formats import WIRES, Feedback, Wire
from vescale_comm._gather import all_gather, gather_pieces
from vescale_comm._group import Group, GroupLike, as_group
from vescale_comm._hierarchical import all_reduce_hierarchical
from vescale_comm._inplace import (
    all_gather_into,
    all_reduce_,
    broadcast_,
    reduce_scatter_into,
)
from vescale_comm._mesh import group_of
from vescale_comm._messages import permute, recv, scatter, send
from vescale_comm._pending import Pending, UnwaitedWarning, unwaited
from vescale_comm._reduce import all_reduce
from vescale_comm._scatter import reduce_scatter
from vescale_comm._simulate import Simulation, SimulationError, simulate
from vescale_comm._trace import Record, Trace, count, merge, trace
from vescale_comm._version import __version__

__all__ = [
    "WIRES",
    "Bucket",
    "Buffer",
    "CollectiveError",
    "CommArgumentError",
    "CommError",
    "CommMismatchError",
    "CommTimeoutError",
    "DeadlockError",
    "Died",
    "Emulator",
    "Fault",
    "Feedback",
    "Group",
    "GroupLike",
    "Order",
    "Pending",
    "Record",
    "Reducer",
    "Simulation",
    "SimulationError",
    "Trace",
    "UnwaitedWarning",
    "Wire",
    "__version__",
    "all_gather",
    "all_gather_into",
    "all_reduce",
    "all_reduce_",
    "all_reduce_bucketed",
    "all_reduce_hierarchical",
    "all_to_all",
    "as_group",
    "barrier",
    "broadcast",
    "broadcast_",
    "chaos",
    "checked",
    "count",
    "gather_ahead",
    "gather_pieces",
    "group_of",
    "merge",
    "permute",
    "recv",
    "reduce_scatter",
    "reduce_scatter_into",
    "scatter",
    "send",
    "simulate",
    "trace",
    "unwaited",
]
