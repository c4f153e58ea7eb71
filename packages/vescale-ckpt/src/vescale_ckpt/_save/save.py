"""`save`: propose, plan, write, commit. After each step all ranks know how it went on all."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from vescale_ckpt._coordination.coordinator import Coordinator, all_or_none, meet_after
from vescale_ckpt._coordination.groups import coordinator_of
from vescale_ckpt._coordination.hosts import cores_per_rank, have_own_processes, host_key
from vescale_ckpt._coordination.meeting import call_of
from vescale_ckpt._errors import CoordinationError, StateError, listed
from vescale_ckpt._format import checksums
from vescale_ckpt._format.safetensors import check_byte_order
from vescale_ckpt._format.write_item import WriteItem
from vescale_ckpt._progress import Progress, silent
from vescale_ckpt._save.assemble import assembled
from vescale_ckpt._save.commit import SaveLocation, commit, discard, new_generation, open_location
from vescale_ckpt._save.plan import SavePlan, TensorOffer, plan_save
from vescale_ckpt._save.write import LocalTensors, WriteJob, divide_into_files, write_data
from vescale_ckpt._state.flatten import flatten
from vescale_ckpt._state.merge import merge
from vescale_ckpt._state.values import Node
from vescale_ckpt._storage.base import Storage
from vescale_ckpt._storage.resolve import resolve, storage_of

# Key in a manifest's provenance. Absent means that no rank reported anything bad.
HEALTHY = "healthy"


@dataclass(frozen=True)
class SaveOptions:
    """Options of `save`, besides the state and where to save it."""

    overwrite: bool = False
    check_replicas: bool = True
    progress: Progress | None = None
    # Plain values for the manifest's provenance; those of rank 0 are written.
    notes: dict[str, Any] = field(default_factory=dict)
    # Whether training can go on from this rank's state. A checkpoint is healthy if all ranks say
    # so.
    healthy: bool = True


def save(
    path: str | os.PathLike[str],
    state: dict[Any, Any],
    *,
    overwrite: bool = False,
    check_replicas: bool = True,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
    timeout: float | None = None,
) -> None:
    """Save `state` as the checkpoint directory `path`: completely, or not at all.

    `state` is a nested dict of tensors, sharded tensors (anything with `__vescale_layout__()` and
    `to_local()`, and torch's own DTensor), `RankLocal(value)`, dicts, lists, tuples, and JSON
    values. Where torch.distributed is initialised this is a collective call over `group` (by
    default all ranks), on a file system that all of them see; otherwise it is one process's own.

    A plain tensor or value counts as the same on every rank that holds it: of every box one copy
    is written, shared out over the ranks by bytes. Ranks may hold different keys.

    Args:
        path: Where the checkpoint shall be. Its parent directories are made.
        state: What to save. It is not changed, and may be changed again when `save` returns.
        overwrite: Replace the checkpoint at `path`. The old one counts until the new one does.
        check_replicas: Compare values, and plain tensors up to 1 MiB, between ranks.
        group: The ranks that save together. A group of one rank saves that rank's state alone.
        progress: Called with (bytes written, bytes to write) of this rank; see `progress_line`.
        timeout: Seconds to wait for ranks that have not called this; after 30 they are named. By
            default as many as the process group was made with, and 600 at most.

    Raises:
        CoordinationError: On every rank that waits: some rank has not called this in time, or has
            called something else. Nothing was written. Or a rank died; if that was at the very
            end, the message says so, and the new checkpoint may be there, whole.
        CheckpointError: On every rank, naming the rank that failed and why. Nothing is committed
            then, and what was at `path` before is still there, unless the message says otherwise.

    Examples:
        >>> import tempfile, torch, vescale_ckpt
        >>> path = tempfile.mkdtemp() + "/step-1"
        >>> vescale_ckpt.save(path, {"weight": torch.ones(2), "step": 1})
        >>> vescale_ckpt.read(path)
        {'weight': tensor([1., 1.]), 'step': 1}
    """
    # Only this process so far. From `meet_after` on, every step is collective: an error on one rank
    # is told to all before any of them raises.
    call = call_of("save", path, timeout)
    coordinator = coordinator_of(group)
    options = SaveOptions(overwrite, check_replicas, progress)
    storage = meet_after(coordinator, call, lambda: storage_of(path))
    save_with(storage, coordinator, path, state, options)


def save_with(
    storage: Storage,
    coordinator: Coordinator,
    path: str | os.PathLike[str],
    state: dict[Any, Any],
    options: SaveOptions,
) -> None:
    """Run `save` on any storage, by any set of ranks."""
    prepared = prepare_save(
        storage, coordinator, location_of(storage, path, options), state, options
    )
    write_now(storage, coordinator, prepared, options.progress)


def write_now(
    storage: Storage, coordinator: Coordinator, prepared: "PreparedSave", progress: Progress | None
) -> None:
    """Write straight from the tensors, and commit."""
    # Straight from the tensors, so several threads may write, each into a file of its own.
    files = divide_into_files(prepared.agreed.plan.items[coordinator.rank], prepared.agreed.threads)
    write_and_commit(
        storage, coordinator, prepared, files, prepared.local_tensors.data, _nothing, progress
    )


class SaveAgreement(NamedTuple):
    """What the ranks agree on from the layout of the state alone, whatever its values are."""

    plan: SavePlan
    checksum: checksums.Checksum
    # How many threads of this rank may write.
    threads: int
    # Whether every rank has a process of its own.
    own_processes: bool


class PreparedSave(NamedTuple):
    """A save that all ranks have agreed on, and of which nothing is written yet."""

    location: SaveLocation
    agreed: SaveAgreement
    tree: Node
    local_tensors: LocalTensors
    notes: dict[str, Any]


def location_of(
    storage: Storage, path: str | os.PathLike[str], options: SaveOptions
) -> SaveLocation:
    """Choose where a save would write; rank 0's choice counts."""
    # Every rank draws a random generation here; `prepare_save` replaces it with rank 0's.
    return SaveLocation(resolve(path), new_generation(), storage.renames, options.overwrite)


def prepare_save(
    storage: Storage,
    coordinator: Coordinator,
    location: SaveLocation,
    state: dict[Any, Any],
    options: SaveOptions,
) -> PreparedSave:
    """Agree on what is saved, and who writes what; make the directory to write in."""
    # Around everything that follows the making of the directory: a refused save leaves nothing.
    with discarded_on_failure(storage, coordinator, location):
        opened, local_tensors = _propose(storage, coordinator, location, state, options)
        tree = merge([answer["tree"] for answer in opened])
        # Pure functions of what all ranks have told all, so the ranks either all pass or all raise
        # here, and need no further message to know it.
        plan = plan_save([_offers(answer["offers"]) for answer in opened])
    # Which threads may run and which checksum is used also follows from all answers, not from this
    # rank's: the files of all ranks have to be of one kind.
    hosts = [answer["host"] for answer in opened]
    agreed = SaveAgreement(
        plan=plan,
        checksum=checksums.agreed(answer["checksum"] for answer in opened),
        threads=cores_per_rank(hosts.count(hosts[coordinator.rank])),
        own_processes=have_own_processes(
            [(answer["host"], answer["process"]) for answer in opened]
        ),
    )
    # Rank 0 has made the directory under its own name for this save.
    location = location._replace(generation=opened[0]["generation"])
    notes = options.notes | health_notes(answer["healthy"] for answer in opened)
    return PreparedSave(location, agreed, tree, local_tensors, notes)


def write_and_commit(
    storage: Storage,
    coordinator: Coordinator,
    prepared: PreparedSave,
    files: list[list[WriteItem]],
    data: Callable[[WriteItem], memoryview],
    done: Callable[[WriteItem], None],
    progress: Progress | None,
) -> None:
    """Write this rank's `files`, whose items' bytes `data` gives, and commit."""
    location, agreed, rank = prepared.location, prepared.agreed, coordinator.rank
    shapes = {name: shape for name, (_, shape) in agreed.plan.tensors.items()}
    tell = progress or silent
    devices = prepared.local_tensors.devices()
    into = location.directory
    job = WriteJob(storage, into, rank, shapes, agreed.checksum, tell, data, done, devices)
    # Each step ends with all ranks knowing how it went on all, so none waits for one that has left.
    with discarded_on_failure(storage, coordinator, location):
        written = all_or_none(coordinator, lambda: write_data(job, files))
        # All files are synced now, on all ranks: only then may the manifest name them.
        manifest = assembled(
            agreed.plan.tensors,
            written,
            prepared.tree,
            agreed.checksum,
            world_size=len(written),
            notes=prepared.notes,
        )
        try:
            # Rank 0 alone commits. The others join to learn whether it did, and raise if not.
            all_or_none(
                coordinator, lambda: commit(storage, location, manifest) if rank == 0 else None
            )
        except CoordinationError as error:
            raise CoordinationError(
                f"{error}. It happened while the save was committed: what is at {location.target} "
                "now is either the new checkpoint or what was there before, and whole"
            ) from error


@contextmanager
def discarded_on_failure(
    storage: Storage, coordinator: Coordinator, location: SaveLocation
) -> Iterator[None]:
    """Remove what a save has written if it fails."""
    try:
        yield
    except Exception:
        # Not on a BaseException: a process that is being killed must not start to tidy up. What it
        # leaves is hidden, and no reader looks at it.
        # Rank 0 made the directory. Errors are raised after an exchange, so no other rank still
        # writes there, unless the ranks have lost each other.
        if coordinator.rank == 0:
            discard(storage, location)
        raise


def _nothing(item: WriteItem) -> None:
    return


def _propose(
    storage: Storage,
    coordinator: Coordinator,
    location: SaveLocation,
    state: dict[Any, Any],
    options: SaveOptions,
) -> tuple[list[Any], LocalTensors]:
    """Exchange what every rank holds. Rank 0 also opens the location and names the generation."""
    # Kept beside the answer, which is exchanged as JSON and must not hold tensors.
    held: list[LocalTensors] = []

    def work() -> dict[str, Any]:
        check_byte_order()
        flat = flatten(state, coordinator.rank)
        local_tensors = LocalTensors(flat)
        held.append(local_tensors)
        offers = local_tensors.offers(compare=options.check_replicas and coordinator.world_size > 1)
        # Last, so that a state that is refused above has not touched the disk.
        if coordinator.rank == 0:
            open_location(storage, location)
        return {
            # Sent by every rank for symmetry; rank 0's counts (see `prepare_save`).
            "generation": location.generation,
            "host": host_key(),
            "process": os.getpid(),
            "checksum": checksums.fastest().name,
            "target": location.target,
            "healthy": options.healthy,
            "tree": flat.tree,
            "offers": {name: offer.to_json() for name, offer in offers.items()},
        }

    answers = all_or_none(coordinator, work)
    check_one_target(answers)
    return answers, held[0]


def health_notes(healthy: Iterable[bool]) -> dict[str, Any]:
    """Return the provenance entry for ranks of this health; empty if all are healthy."""
    return {} if all(healthy) else {HEALTHY: False}


def check_one_target(answers: list[dict[str, Any]]) -> None:
    """Raise if ranks save to different places."""
    # Ranks that write to different places would each find the other's files missing, at the end.
    targets = sorted({answer["target"] for answer in answers})
    if len(targets) > 1:
        raise StateError(f"ranks save to different paths: {listed(targets)}")


def _offers(data: dict[str, list[Any]]) -> dict[str, TensorOffer]:
    return {name: TensorOffer.from_json(offer) for name, offer in data.items()}
