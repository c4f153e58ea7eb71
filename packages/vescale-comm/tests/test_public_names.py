"""What users import is where they find it: every public name, in every public module."""

import importlib
import pkgutil
import subprocess
import sys

import pytest
import vescale_comm

PUBLIC = {
    "vescale_comm": [
        "Bucket", "Buffer", "CollectiveError", "CommArgumentError", "CommError",
        "CommMismatchError", "CommTimeoutError", "DEFAULT_TIMEOUT", "DeadlockError", "Died",
        "Emulator", "ExecutionLog", "Fault", "Feedback", "Group", "GroupLike", "Order", "Pending",
        "RankFailedError", "Record", "Reducer", "Simulation", "SimulationError", "SplitSizes",
        "Trace", "UnwaitedWarning", "WIRES", "Wire", "__version__", "all_gather",
        "all_gather_into", "all_reduce", "all_reduce_", "all_reduce_bucketed",
        "all_reduce_hierarchical", "all_to_all", "all_to_all_single", "as_group", "barrier",
        "bound_waits", "broadcast", "broadcast_", "chaos", "checked", "count", "execution_log",
        "explained_failures", "gather_ahead", "gather_pieces", "group_alone", "group_of", "merge",
        "permute", "recv", "reduce_scatter", "reduce_scatter_into", "scatter", "send", "simulate",
        "trace", "unwaited",
    ],
    "vescale_comm.agreement": [
        "broadcast_text", "by_ranks", "digest", "gather_bytes", "gather_failures",
        "gather_numbers", "gather_texts", "message_device", "named", "several_ranks",
    ],
    "vescale_comm.operators": ["Effects", "arguments_of", "effects_of"],
    "vescale_comm.generators": ["States", "generators_of", "mixed"],
    "vescale_comm.graphs": ["Started", "finish", "start_all_gather", "start_all_reduce"],
    "vescale_comm.nested": [
        "Copied", "field_names", "map_tensors", "named_tensors_within", "tensors_within",
        "with_fields",
    ],
    "vescale_comm.testing": [
        "Failed", "Ok", "Outcome", "WorkerError", "choose_core", "device_mesh", "outcomes",
        "preload", "run", "shutdown",
    ],
    "vescale_comm.ddp": ["install"],
    "vescale_comm.fsdp2": ["ReduceScatter", "install"],
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_a_module_exports_these_names_and_has_them(name):
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(PUBLIC[name])
    assert [each for each in PUBLIC[name] if not hasattr(module, each)] == []


def test_there_are_no_other_public_modules():
    found = {each.name for each in pkgutil.iter_modules(vescale_comm.__path__, "vescale_comm.")}
    public = {name for name in found if not name.startswith("vescale_comm._")}
    assert {"vescale_comm", *public} == set(PUBLIC)


def test_what_the_package_itself_imports_is_not_taken_for_public():
    named = {each for each in vars(vescale_comm) if not each.startswith("_")}
    modules = {name.partition(".")[2] for name in PUBLIC} - {""}
    assert named - modules <= set(PUBLIC["vescale_comm"])


FIRST = """
import importlib, os, sys
import torch
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        module = importlib.import_module(name)
        [getattr(module, each) for each in module.__all__]
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


def test_a_public_module_can_be_imported_first():
    # Each in a process of its own: here everything is imported already, whatever the order.
    command = [sys.executable, "-W", "error", "-c", FIRST, *PUBLIC]
    subprocess.run(command, check=True, timeout=120)
