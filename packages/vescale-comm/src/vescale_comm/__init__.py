"""Collectives that are typed, fused, ordered, compressed, traced and simulated."""

from vescale_comm import _torch_versions as _torch_versions
from vescale_comm._checks.agreement import checked
from vescale_comm._collectives.all_gather import all_gather, gather_pieces
from vescale_comm._collectives.all_reduce import all_reduce
from vescale_comm._collectives.all_to_all import SplitSizes, all_to_all, all_to_all_single
from vescale_comm._collectives.broadcast import barrier, broadcast
from vescale_comm._collectives.bucket import Bucket, Buffer
from vescale_comm._collectives.bucketed_calls import Reducer, all_reduce_bucketed, gather_ahead
from vescale_comm._collectives.hierarchical import all_reduce_hierarchical
from vescale_comm._collectives.in_place import (
    all_gather_into_tensor,
    all_reduce_,
    broadcast_,
    reduce_scatter_tensor,
)
from vescale_comm._collectives.permute import permute
from vescale_comm._collectives.reduce_scatter import reduce_scatter
from vescale_comm._collectives.scatter import scatter
from vescale_comm._collectives.send_recv import recv, send
from vescale_comm._engine.failures import explained_failures
from vescale_comm._engine.handles import Pending, UnwaitedWarning, unwaited
from vescale_comm._errors import (
    CollectiveError,
    CommArgumentError,
    CommError,
    CommMismatchError,
    CommTimeoutError,
    DeadlockError,
    RankFailedError,
)
from vescale_comm._groups.bound_waits import DEFAULT_TIMEOUT, bound_waits
from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._groups.launched_world import init_process_group
from vescale_comm._groups.mesh_groups import group_alone, group_of
from vescale_comm._simulation.chaos import Died, Fault, chaos
from vescale_comm._simulation.emulator import Emulator
from vescale_comm._simulation.simulate import Simulation, SimulationError, simulate
from vescale_comm._trace.record import Record
from vescale_comm._trace.trace import Trace, count, merge, trace
from vescale_comm._version import __version__
from vescale_comm._watchdog.current_watcher import compare_anew, execution_log
from vescale_comm._watchdog.execution_log import ExecutionLog
from vescale_comm._wire.fold import Order
from vescale_comm._wire.formats import WIRES, Feedback, Wire

__all__ = [
    "DEFAULT_TIMEOUT",
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
    "ExecutionLog",
    "Fault",
    "Feedback",
    "Group",
    "GroupLike",
    "Order",
    "Pending",
    "RankFailedError",
    "Record",
    "Reducer",
    "Simulation",
    "SimulationError",
    "SplitSizes",
    "Trace",
    "UnwaitedWarning",
    "Wire",
    "__version__",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_",
    "all_reduce_bucketed",
    "all_reduce_hierarchical",
    "all_to_all",
    "all_to_all_single",
    "as_group",
    "barrier",
    "bound_waits",
    "broadcast",
    "broadcast_",
    "chaos",
    "checked",
    "compare_anew",
    "count",
    "execution_log",
    "explained_failures",
    "gather_ahead",
    "gather_pieces",
    "group_alone",
    "group_of",
    "init_process_group",
    "merge",
    "permute",
    "recv",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "simulate",
    "trace",
    "unwaited",
]
