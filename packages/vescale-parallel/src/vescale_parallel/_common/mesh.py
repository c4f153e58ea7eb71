"""`mesh(dp=2, tp=2)`: named sizes in, a `torch.distributed.DeviceMesh` out."""

import atexit
import math
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from vescale_comm import DEFAULT_TIMEOUT, Group, bound_waits, group_of, init_process_group
from vescale_comm.agreement import Facts, require_same

from vescale_parallel._errors import DisagreementError, MeshError

AXES: Final = ("pp", "dp", "cp", "ep", "tp")
"""The axes the field knows, outermost first: neighbours on `tp` talk most and sit closest."""

# The rank and the place of a process on its machine: of torchrun, Slurm, Open MPI.
_LOCAL_RANKS: Final = (
    ("", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
)

# How long a rank whose arguments are wrong waits for others, to tell them.
_TELL_SECONDS = 30.0


def mesh(
    *, device_type: str | None = None, timeout: float | None = None, **sizes: int
) -> DeviceMesh:
    """Make a mesh with named axes over all processes.

    Axes are ordered `pp, dp, cp, ep, tp` (outermost first) whatever the order of the keywords; as
    soon as one has another name, the order of the keywords is kept. Without sizes: `dp` over all.
    The process group is made when there is none: from torchrun's environment, or one process.

    Args:
        device_type: `"cpu"` or `"cuda"`; by default CUDA where it is available, unless a process
            group is there already that has only gloo for it. Of several devices this process gets
            the one that is current, if it has been chosen; else the one that the launcher's local
            rank counts, or if there is none the rank.
        timeout: seconds after which a rank that waits for others raises an error that says for
            whom, and what those do; it is logged after 30 seconds already. Holds for all process
            groups of this process. By default ten minutes where `mesh` makes the process group;
            groups that exist keep theirs. See `vescale_comm.bound_waits` for both times.
        **sizes: the extent of each axis; one may be -1 and takes what is left.

    Raises:
        MeshError: on every rank that asked for it: the sizes do not fit, the timeout is no time,
            or there is no such device.
        DisagreementError: on every rank, before a group of an axis is made: ranks ask for other
            meshes.

    Examples:
        >>> mesh(dp=1, tp=-1, device_type="cpu").mesh_dim_names
        ('dp', 'tp')
    """
    device = device_type or _default_device()
    ordered, problem = _resolved(sizes or {"dp": -1}, timeout, device)
    bounded = timeout is not None or not dist.is_initialized()
    seconds = DEFAULT_TIMEOUT if timeout is None else timeout
    # A rank that is wrong joins the group all the same: the others are on their way to the
    # comparison, and would wait for it there until their timeout.
    if problem is None:
        _ensure_process_group(device, seconds)
    else:
        _join_to_tell(problem)
    _require_same_call(ordered, device, problem)
    made = init_device_mesh(device, tuple(ordered.values()), mesh_dim_names=tuple(ordered))
    if bounded:
        # Afterwards: torch gives the groups of the axes its own timeout, not that of the world.
        bound_waits(timeout=seconds)
    return made


def _join_to_tell(problem: MeshError) -> None:
    """Join the processes that may ask for a mesh that does fit, and would wait for this one.

    Raises:
        MeshError: `problem`, at once where there is nobody to tell.
    """
    if dist.is_initialized():
        return
    if world_size() == 1 or not os.environ.keys() >= {"RANK", "MASTER_ADDR", "MASTER_PORT"}:
        raise problem
    try:
        _ensure_process_group("cpu", _TELL_SECONDS)
    except Exception as error:  # the others never came, and this is what the user has to mend
        raise problem from error


def _resolved(
    sizes: Mapping[str, int], timeout: float | None, device: str
) -> tuple[dict[str, int], MeshError | None]:
    try:
        _check_timeout(timeout)
        _check_device(device)
        return resolve_sizes(sizes, world_size()), None
    except MeshError as error:
        return {}, error


def _require_same_call(sizes: dict[str, int], device: str, problem: MeshError | None) -> None:
    """All ranks make one mesh, or all raise: groups of other ranks would wait for each other."""
    asked = {"sizes": ", ".join(f"{axis}={size}" for axis, size in sizes.items())}
    held = {"mesh": (asked if problem is None else {}) | {"device type": device}}
    head = "mesh was not called with the same on all ranks:"
    advice = "Ask for the same sizes, in the same order, on every rank."
    require_same(Facts(held, head, advice, DisagreementError), problem=problem)


def world_size() -> int:
    """Return how many processes there are: of the process group, else as torchrun says, else 1.

    Raises:
        MeshError: the launcher's variables say no number, or no number for this process.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    # Either one alone is what is left of a launcher's: a world of one would train on by itself.
    rank = os.environ.get("RANK")
    said = os.environ.get("WORLD_SIZE", "1" if rank is None else "not set")
    size, its = _number(said, 0), _number(rank or "", -1)
    if 0 <= its < size or (rank is None and size == 1):
        return size
    raise MeshError(
        f"WORLD_SIZE is {said} and RANK is {'not set' if rank is None else rank}: a number of "
        "processes, and this one's among them from 0, are needed. torchrun sets both; for one "
        "process set neither."
    )


def from_launcher(name: str, otherwise: int) -> int:
    """Return the number that a launcher's variable says; `otherwise` where it says none."""
    return _number(os.environ.get(name, ""), otherwise)


def _number(said: str, otherwise: int) -> int:
    # Of thousands of digits Python makes no number.
    return int(said) if said.isdecimal() and len(said) < 10 else otherwise


def resolve_sizes(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """Sizes in mesh order with the -1 filled in.

    Raises:
        MeshError: a size is not a positive number or -1, two are -1, or the product is not `world`.
    """
    for axis, size in sizes.items():
        if size != -1:
            _check_size(axis, size)
    order = sorted(sizes, key=AXES.index) if set(sizes) <= set(AXES) else list(sizes)
    unknown = [axis for axis in order if sizes[axis] == -1]
    asked = ", ".join(f"{axis}={sizes[axis]}" for axis in order)
    if len(unknown) > 1:
        raise MeshError(f"mesh({asked}): only one size may be -1, and {len(unknown)} are.")
    product = math.prod(size for size in sizes.values() if size != -1)
    if unknown and world % product == 0:
        return {axis: world // product if axis in unknown else sizes[axis] for axis in order}
    if unknown or product != world:
        raise MeshError(_does_not_fit(asked, product, world, bool(unknown)))
    return {axis: sizes[axis] for axis in order}


def _check_timeout(timeout: object) -> None:
    if timeout is None:
        return
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    # Above a thousand years torch's milliseconds overflow; NaN is not between anything.
    if not number or not 0 < timeout < 3e10:  # type: ignore[operator]
        raise MeshError(f"mesh(timeout={timeout!r}): a number of seconds above 0 is needed.")


def _default_device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    # Whoever made a group of gloo alone beside a GPU did not mean to train on it.
    group = dist.get_backend_config() if dist.is_initialized() else "cuda:nccl"
    backends = dict(pair.split(":") for pair in group.split(","))
    return "cpu" if backends.get("cuda", "gloo") == "gloo" else "cuda"


def _device_index() -> int:
    """Return which of the visible CUDA devices is this process's."""
    bound = dist.group.WORLD.bound_device_id if dist.is_initialized() else None  # type: ignore[union-attr]
    if bound is not None:
        return int(bound.index)
    # Asking for the current device would make CUDA's context, on whatever device.
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    count = torch.cuda.device_count()
    # 0 is also what is current where nobody has chosen. And schedulers may let each process see its
    # own device only, while they count processes as ever.
    if current or count == 1:
        return current
    there = dist.is_initialized()
    rank = str(dist.get_rank()) if there else os.environ.get("RANK", "0")
    for whole, local in _LOCAL_RANKS:
        # Of the same start: a job's only task may start processes of its own.
        if local in os.environ and (not whole or os.environ.get(whole) == rank):
            return from_launcher(local, current)
    # Nobody counts by machine. NCCL takes no device twice; others, as those of `simulate`, may.
    own = not there or "nccl" in dist.get_backend_config()
    return int(rank) % max(count, 1) if own else current


def _check_device(device: str) -> None:
    if device != "cuda":
        return
    at, count = _device_index(), torch.cuda.device_count()
    if at >= count:
        raise MeshError(
            f"mesh(device_type='cuda'): process {at} of this machine has no CUDA device, for there "
            f"are {count}. Start fewer processes per node, or ask for device_type='cpu'."
        )


def _check_size(axis: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise MeshError(
            f"mesh axis {axis}={size!r}: a size is a positive integer (for a mesh over processes, "
            "one may be -1 and takes what is left)."
        )


def _does_not_fit(asked: str, product: int, world: int, has_unknown: bool) -> str:
    if has_unknown:
        return (
            f"mesh({asked}): the given sizes make {product}, which does not divide the "
            f"{world} process(es) that run. Start a multiple of {product}, or change a size."
        )
    return (
        f"mesh({asked}) needs {product} process(es) and {world} run(s). Start it with "
        f"'torchrun --nproc-per-node {product} ...', or choose sizes whose product is {world} "
        "(one size may be -1 and takes what is left)."
    )


def mesh_sizes(mesh_shape: Mapping[str, int] | DeviceMesh) -> dict[str, int]:
    """Axis name to size, in mesh order, of a mesh or of a plain mapping.

    Raises:
        MeshError: the mesh has no axis names, or a size is not a positive integer.
    """
    if not isinstance(mesh_shape, DeviceMesh):
        for axis, size in mesh_shape.items():
            _check_size(axis, size)
        return dict(mesh_shape)
    names = mesh_shape.mesh_dim_names
    if names is None:
        raise MeshError(
            f"{mesh_shape} has no axis names, and plans speak of axes by name. Make it with "
            "vescale_parallel.mesh(dp=..., tp=...) or init_device_mesh(..., mesh_dim_names=...)."
        )
    return dict(zip(names, mesh_shape.shape, strict=True))


def mesh_ranks(mesh: DeviceMesh) -> list[int]:
    """Return the ranks of a mesh in the order of its coordinates."""
    return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def everyone(mesh: DeviceMesh | None) -> Group | None:
    """Return the group of all ranks of a mesh; None where these are all processes."""
    # Not a group of its own where it is the world: a mesh of all processes may be one of several,
    # and what they compare goes the same way whichever of them asks.
    if mesh is None or not dist.is_initialized() or mesh.mesh.numel() == dist.get_world_size():
        return None
    return group_of(mesh, tuple(range(mesh.ndim)))


def _ensure_process_group(device: str, timeout: float) -> None:
    """Join torchrun's processes, or be a group of one; leave an existing group alone."""
    if device == "cuda":
        # NCCL binds a communicator to the current device, so it must be set before the first use.
        torch.cuda.set_device(_device_index())
    if dist.is_initialized():
        return
    # Small facts on the host (errors, digests) travel by gloo also where tensors travel by NCCL.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    seconds = timedelta(seconds=timeout)
    if "RANK" in os.environ:
        init_process_group(backend, timeout=seconds)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        # Of one process: in memory, so that no port is taken.
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=seconds)
    atexit.register(_leave_process_group)


def _leave_process_group() -> None:
    """Destroy what `mesh` set up, for scripts that do not."""
    # gloo's threads abort a process that ends with its group alive: not always, but about one in
    # ten under load, after all work is done. After an error others may still wait in a
    # collective, where taking the group down could wait for them in turn.
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
