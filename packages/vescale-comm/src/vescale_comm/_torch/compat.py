"""The one module that looks behind torch's public API; each look is tested for, with a fallback."""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as _c10d_module
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from vescale_comm._errors import CommError

_c10d: Any = _c10d_module

try:  # what tracers use in place of tensors
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    _TRACED: tuple[type, ...] = (FakeTensor, FunctionalTensor)
except ImportError:
    _TRACED = ()

no_torch_function: Any = torch._C.DisableTorchFunction
"""Context in which torch function modes see nothing."""


def forget_shardings() -> None:
    """Empty DTensor's cache of shardings, if DTensor was used and there is such a function.

    Its keys are meshes, and those of another world may be equal: torch 2.11 then takes process
    groups that are gone from it.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    # Imported here: torch does not do so by itself, and the cache is there without it.
    debug = importlib.import_module("torch.distributed.tensor.debug")
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


dispatch_modes: Any = torch._C._len_torch_dispatch_stack


def being_traced(x: object) -> bool:
    """Return whether what is done to `x` is written down, and not done or not only done."""
    if type(x) is not torch.Tensor and isinstance(x, _TRACED):
        return True
    return dispatch_modes() > 0 and _proxies() is not None


def _proxies() -> Any:
    """Return the mode that writes down what is done to tensors, if one is entered."""
    found = sys.modules.get("torch.fx.experimental.proxy_tensor")  # not imported: not entered
    return None if found is None else found.get_proxy_mode()


def is_registered(process_group: ProcessGroup) -> bool:
    """Return whether a process group exists and was not destroyed; True where torch hides it."""
    # Asked at every call: one look and no more.
    world = getattr(_c10d, "_world", None)
    return world is None or process_group in world.pg_map


def process_group_named(name: str) -> ProcessGroup:
    """Return the process group that torch knows by this name, as operators are given it."""
    resolve = getattr(_c10d, "_resolve_process_group", None)
    if resolve is None:
        raise CommError(f"torch {torch.__version__} does not find process groups by their names")
    found: ProcessGroup = resolve(name)
    return found


def unboxed_process_group(value: Any) -> ProcessGroup | None:
    """Return the process group that an operator was given: boxed, by its name, or as it is.

    None where torch does not say.
    """
    if isinstance(value, str):
        return process_group_named(value)
    if isinstance(value, torch.ScriptObject):
        unbox = getattr(ProcessGroup, "unbox", None)
        value = None if unbox is None else unbox(value)
    return value if isinstance(value, ProcessGroup) else None


def data_parallel_meshes(module: Any) -> list[tuple[DeviceMesh, int, int | None]]:
    """Return the meshes over which `fully_shard` reduces gradients of a module's own parameters.

    Args:
        module: an `FSDPModule`.

    Returns:
        For each of its groups of parameters, usually one: the mesh, the dim over which they are
        sharded, and that over which the shards are replicated, if they are.
    """
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 there was one
        only = getattr(state, "_fsdp_param_group", None)
        groups = [] if only is None else [only]
    infos = [getattr(group, "mesh_info", None) for group in groups]
    if any(info is None for info in infos):
        raise CommError(f"torch {torch.__version__} does not say over which mesh it shards")
    found: list[Any] = infos
    return [
        (info.mesh, info.shard_mesh_dim, getattr(info, "replicate_mesh_dim", None))
        for info in found
    ]


def process_group_count() -> int | None:
    """Return how many process groups this process is a member of; None where torch hides it."""
    names = getattr(getattr(_c10d, "_world", None), "pg_names", None)
    return None if names is None else len(names)


def counts_new_groups() -> bool:
    """Return whether torch names new groups by how many were made here, as it does from 2.14 on.

    Until 2.13 it is by `process_group_count`.
    """
    naming = getattr(_c10d, "_hash_ranks_to_str", None)
    return naming is not None and "group_count" in naming.__code__.co_names


@contextmanager
def new_groups_numbered(number: int) -> Iterator[None]:
    """While entered, torch counts from `number`; afterwards it continues from where it was.

    What is made by some ranks only must not be counted: torch names the next group of all by it.
    """
    world = _c10d._world
    before, world.group_count = world.group_count, number
    try:
        yield
    finally:
        world.group_count = before


def sequence_number(process_group: Any) -> int | None:
    """Return how many collectives a process group has had; None where torch does not say."""
    ask = getattr(process_group, "_get_sequence_number_for_group", None)
    try:
        return None if ask is None else int(ask())
    except RuntimeError:  # a backend that does not count
        return None


def calls_of(process_group: Any) -> int | None:
    """Return how many calls the backends of a process group have had, whoever made them.

    None where torch does not say.
    """
    backends: dict[int, Any] = {}
    for pair in dist.get_backend_config(process_group).split(","):
        try:
            # One backend may serve several types of device.
            found = process_group._get_backend(torch.device(pair.partition(":")[0]))
        except (AttributeError, RuntimeError):  # a type that this machine does not have
            continue
        backends[id(found)] = found
    counts = [count for one in backends.values() if (count := sequence_number(one)) is not None]
    return sum(counts) if counts else None


def set_group_timeout(process_group: ProcessGroup, timeout: timedelta) -> bool:
    """Set how long collectives of a group wait; return whether torch and its backend can."""
    # Others warn, and leave it as it was.
    backends = dist.get_backend_config(process_group)
    # Public from torch 2.14 on, where the old name warns.
    change = getattr(dist, "set_timeout", None) or getattr(_c10d, "_set_pg_timeout", None)
    if change is None or not ("gloo" in backends or "nccl" in backends):
        return False
    change(timeout, process_group)
    return True


def process_groups() -> list[ProcessGroup]:
    """Return the process groups that this process is a member of; none where torch hides them."""
    return list(getattr(getattr(_c10d, "_world", None), "pg_map", {}))


def shared_store_of(process_group: ProcessGroup) -> tuple[Store, str] | None:
    """Return `store_of`, if it is one that processes share, and its kind.

    Kinds are "TCPStore", of which one process is the server, and "FileStore".
    """
    store: Any = store_of(process_group)
    below = store
    while isinstance(below, PrefixStore):
        below = getattr(below, "underlying_store", None)
    kind = type(below).__name__
    shared = kind in ("TCPStore", "FileStore") and hasattr(store, "clone")
    return (store, kind) if shared else None


def store_of(process_group: ProcessGroup) -> Store | None:
    """Return the store over which the members found each other; None where torch hides it."""
    entry = getattr(getattr(_c10d, "_world", None), "pg_map", {}).get(process_group)
    store = entry[1] if entry else None
    return store if isinstance(store, Store) else None


def can_separate_worlds() -> bool:
    """Return whether several ranks can have their process groups in one process."""
    registry = torch._C._distributed_c10d
    return hasattr(_c10d, "_World") and hasattr(registry, "_set_thread_isolation_mode")


def settle_device_guard() -> None:
    """Have torch make here what it otherwise makes in the first thread that needs it.

    Where torch is built for CUDA and there is no GPU, fake tensors stand on a device guard that
    torch 2.11 makes once and loses with the thread that asked first: the next use is a crash. Rank
    threads end before the process does, so their caller asks.
    """
    settle = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if settle is not None:
        settle()


def can_order_ranks() -> bool:
    """Return whether torch makes process groups of members in an order that is not ascending."""
    return "sort_ranks" in signature(dist.new_group).parameters


def separate_world() -> Any:
    """Return an empty table of process groups, such as torch has one of in each process."""
    base = _c10d._World
    # Its tables are globals of the module, under the properties' names with an underscore.
    fields = [name for name in vars(base) if isinstance(getattr(_c10d, f"_{name}", None), dict)]

    # Created at first use, on the instance: two worlds share no dict.
    def _own(name: str) -> property:
        return property(lambda world: world.__dict__.setdefault(f"_own_{name}", {}))

    def _get_count(world: Any) -> int:
        count: int = world.__dict__.get("_own_count", 0)
        return count

    def _set_count(world: Any, value: int) -> None:
        world.__dict__["_own_count"] = value

    members: dict[str, object] = {name: _own(name) for name in fields}
    members["group_count"] = property(_get_count, _set_count)
    return type("SeparateWorld", (base,), members)()


def current_world() -> Any:
    """Return the table of process groups that torch uses now."""
    return getattr(_c10d, "_world", None)


def use_world(world: Any) -> None:
    """Make torch use a table of process groups."""
    _c10d._world = world


@contextmanager
def isolated_threads(identity: Callable[[], object]) -> Iterator[None]:
    """While entered, each thread has its own registry of groups, and meshes of their own ranks.

    Args:
        identity: what the running rank is: meshes of different ranks are then different, where
            torch would treat them as one and give one rank the process groups of another.
    """
    registry: Any = torch._C._distributed_c10d
    mesh_class: Any = DeviceMesh
    initialise = mesh_class.__init__

    def _with_identity(mesh: Any, *args: Any, **kwargs: Any) -> None:
        initialise(mesh, *args, **kwargs)
        mesh._thread_id = identity()

    hook = sys.excepthook  # init_process_group replaces it
    mesh_class.__init__ = _with_identity
    registry._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        registry._set_thread_isolation_mode(False)
        mesh_class.__init__ = initialise
        sys.excepthook = hook
        world = _c10d._world.default_pg
        registry._set_global_rank(-1 if world is None else world.rank())


def warning_state() -> tuple[Any, ...]:
    """Return what `warnings.catch_warnings` changes in this process."""
    module: Any = warnings
    return list(module.filters), module.showwarning, module._showwarnmsg_impl


def set_warning_state(state: tuple[Any, ...]) -> None:
    """Restore what `warning_state` returned."""
    module: Any = warnings
    module.filters[:], module.showwarning, module._showwarnmsg_impl = state
    module._filters_mutated()
