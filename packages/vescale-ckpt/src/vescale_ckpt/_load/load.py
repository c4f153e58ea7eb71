"""`load` and `read`: open, match, report what does not fit, and only then touch a tensor."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from vescale_ckpt._coordination.coordinator import (
    Coordinator,
    SingleProcess,
    all_or_none,
    meet_after,
)
from vescale_ckpt._coordination.groups import coordinator_of
from vescale_ckpt._coordination.hosts import cores_per_rank, host_key
from vescale_ckpt._coordination.meeting import call_of
from vescale_ckpt._errors import MismatchError, as_checkpoint_error, listed
from vescale_ckpt._format.safetensors import check_byte_order
from vescale_ckpt._load.fetch import fetch
from vescale_ckpt._load.match import EVERYTHING, Match, Selection, match
from vescale_ckpt._load.mismatch import Differences, differences, mismatch_message
from vescale_ckpt._load.open import Checkpoint, open_checkpoint
from vescale_ckpt._load.overlap import saved_alike
from vescale_ckpt._load.reads import SlabRead, blocks_nbytes, plan_reads
from vescale_ckpt._load.shared_reads import (
    SharedReadContext,
    SharingHandles,
    fetch_shared,
    needs_of,
    open_handles,
    plan_sharing,
)
from vescale_ckpt._progress import ByteCounter, Progress, silent
from vescale_ckpt._state.values import WHOLE
from vescale_ckpt._storage.base import Storage
from vescale_ckpt._storage.resolve import resolve, storage_of

StateT = TypeVar("StateT", bound=dict[Any, Any])


@dataclass(frozen=True)
class LoadOptions:
    """Options of `load`, besides what to load and into what."""

    strict: bool = True
    progress: Progress | None = None
    selection: Selection = EVERYTHING
    share: bool = True


def load(
    path: str | os.PathLike[str],
    into: StateT,
    *,
    strict: bool = True,
    only: str | Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    cast: bool = False,
    share: bool = True,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
    timeout: float | None = None,
) -> StateT:
    """Fill the tensors of `into` from the checkpoint at `path`, whatever layouts they have.

    `into` has the nesting of the saved state. Its tensors are filled in place (parameters that
    require grad, too) and are the tensors of the state that is returned; everything else in that
    state comes from the checkpoint. `into` itself and its containers are not changed. Where
    `into` has `WHOLE` the result has what was saved there, as full tensors on the CPU.

    Only the blocks of bytes that this rank needs are read, and each is verified first. Where
    torch.distributed is initialised this is a collective call over `group`; the number of ranks
    need not be the one that saved.

    Args:
        path: A checkpoint that `save` made.
        into: Where to load to.
        strict: Raise if `into` asks for what the checkpoint lacks, or if the checkpoint holds
            tensors that no rank asks for. Otherwise such entries stay as they are in `into`, or
            are left out. Another shape always raises, another dtype does unless `cast`.
        only: Load what is called like one of these globs, such as "model/*"; everything else
            stays as it is in `into`, and is neither missing nor unexpected. If `strict`,
            each glob must name something.
        rename: Where the checkpoint's name of a tensor, value or dict -> where it is in `into`:
            `{"model/decoder": "model/dec"}`. Names are as `ls` prints them.
        cast: Convert to another dtype of the same kind of number, float32 to bfloat16; integers
            only where all of the saved dtype fit.
        share: Whether what several ranks of one machine need is read and verified once, into memory
            that they share, if it is enough to be worth it.
        group: The ranks that load together.
        progress: Called with (bytes read, bytes to read) of this rank; see `progress_line`.
        timeout: Seconds to wait for ranks that have not called this; after 30 they are named. By
            default as many as the process group was made with, and 600 at most.

    Raises:
        CoordinationError: On every rank that waits: some rank has not called this in time, or has
            called something else. `read` is for one rank alone.
        MismatchError: On every rank, before any tensor was changed: the keys, shapes and dtypes
            that differ.
        CheckpointError: On every rank. If it comes from reading data (`CorruptError`,
            `StorageError`), tensors of `into` may hold a mixture of old and new; the message says
            so then.

    Examples:
        >>> import tempfile, torch, vescale_ckpt
        >>> path = tempfile.mkdtemp() + "/step-1"
        >>> vescale_ckpt.save(path, {"weight": torch.ones(2), "step": 1})
        >>> weight = torch.zeros(2)
        >>> vescale_ckpt.load(path, into={"weight": weight})
        {'weight': tensor([1., 1.]), 'step': 1}
        >>> weight
        tensor([1., 1.])
    """
    # Only this process so far. From `meet_after` on, every step is collective: an error on one rank
    # is told to all before any of them raises.
    call = call_of("load", path, timeout)
    coordinator = coordinator_of(group)
    selection = Selection(_patterns(only), rename, cast)
    options = LoadOptions(strict, progress, selection, share)
    storage = meet_after(coordinator, call, lambda: storage_of(path))
    loaded: StateT = load_with(storage, coordinator, path, into, options)
    return loaded


def _patterns(only: str | Iterable[str] | None) -> str | tuple[str, ...] | None:
    return only if only is None or isinstance(only, str) else tuple(only)


def compare(
    path: str | os.PathLike[str],
    into: dict[Any, Any],
    *,
    only: str | Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    cast: bool = False,
) -> Differences:
    """Tell what `load` with the same arguments would miss or leave; load nothing.

    For this process only: not collective.

    Raises:
        CheckpointError: There is no committed checkpoint at `path`, or its manifest is damaged.

    Examples:
        >>> import tempfile, torch, vescale_ckpt
        >>> path = tempfile.mkdtemp() + "/step-1"
        >>> vescale_ckpt.save(path, {"weight": torch.ones(2), "bias": torch.ones(1)})
        >>> vescale_ckpt.compare(path, {"weight": torch.ones(2), "scale": torch.ones(1)})
        Differences(missing=['scale'], unexpected=['bias'], different=[])
    """
    storage = storage_of(path)
    checkpoint = open_checkpoint(storage, resolve(path))
    selection = Selection(_patterns(only), rename, cast)
    found = match(checkpoint.manifest, into, 0, 1, selection)
    # As rank 0 of 1, and by itself: it may be called on one rank, so it must not communicate.
    clashes = found.clashes + _different_twins(storage, checkpoint, found)
    return Differences(found.missing, found.unexpected, clashes)


def read(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """Read all of `path` as full tensors on the CPU. For this process only: not collective.

    A `RankLocal` comes back as a `PerRank` with the values of all ranks that saved.

    Raises:
        CheckpointError: There is no committed checkpoint at `path`, or it is damaged.
    """
    storage, target = storage_of(path), resolve(path)
    state: dict[Any, Any] = load_with(storage, SingleProcess(), target, WHOLE, LoadOptions())
    return state


def load_with(
    storage: Storage,
    coordinator: Coordinator,
    path: str | os.PathLike[str],
    into: Any,
    options: LoadOptions,
) -> Any:
    """Run `load` from any storage, by any set of ranks."""
    target = resolve(path)
    # No tensor is touched before all ranks have found that their states fit.
    opened, answers = _matched(storage, coordinator, target, into, options)
    checkpoint, host = opened.checkpoint, answers[coordinator.rank]["host"]
    threads = cores_per_rank([answer["host"] for answer in answers].count(host))
    try:
        # From all ranks' answers: the ranks of one machine agree on whether they share without a
        # message.
        sharing = _sharing(coordinator, opened, answers, remote=not storage.renames)

        @_mention_changes(into)
        def work() -> None:
            rest, total = opened.reads, 0
            # `attach` is false on all ranks of the machine or on none; then each reads for itself.
            shared = sharing is not None and sharing.attach()
            if sharing is not None and shared:
                rest, total = sharing.own, sharing.read_bytes
            block_bytes = checkpoint.manifest.block_bytes
            total += sum(blocks_nbytes(read.chunk, read.blocks, block_bytes) for read in rest)
            count = ByteCounter(total, options.progress or silent)
            # False means that a neighbour failed: this rank has nothing to report, and learns the
            # error from the exchange below.
            if sharing is None or not shared or fetch_shared(storage, sharing, count):
                fetch(storage, checkpoint, rest, count, threads)

        # After reading, whatever happened: no rank continues with a state that another could not
        # load.
        all_or_none(coordinator, work)
    finally:
        # After the exchange: a neighbour may use this rank's memory and pipe until it has finished.
        opened.close()
    # Tensors inside saved rank-local values are filled only now. `reshard` is the user's code and
    # may fail on some ranks, hence another exchange; all ranks answered `late`, so all take part.
    if any(answer["late"] for answer in answers):
        reshard = _mention_changes(into)(_reshard)
        all_or_none(coordinator, lambda: reshard(opened.found, coordinator))
    return opened.found.state


@contextmanager
def _mention_changes(into: Any) -> Iterator[None]:
    """Say in what is raised that tensors of the caller's may have been filled before."""
    try:
        yield
    except Exception as error:
        # `read` has none: what it fills nobody gets to see.
        if into is WHOLE:
            raise
        found = as_checkpoint_error(error)
        raise type(found)(
            f"{found}. Tensors of `into` that were read before are filled, and one may be in part"
        ) from error


def _sharing(
    coordinator: Coordinator, opened: "_OpenedLoad", answers: list[dict[str, Any]], *, remote: bool
) -> SharedReadContext | None:
    """Prepare to read together with others of this machine; None if each reads for itself."""
    plan = plan_sharing(opened.checkpoint, answers, remote=remote)[
        answers[coordinator.rank]["host"]
    ]
    # Equal for the ranks of one machine: the plan is, and it has no rounds if one of them has no
    # handles.
    if not plan.rounds or opened.handles is None:
        return None
    reads = {read.id: read for read in opened.reads}
    offers = {rank: answers[rank]["offer"] for rank in plan.ranks}
    return SharedReadContext(
        opened.checkpoint, plan, coordinator.rank, opened.handles, offers, reads
    )


class _OpenedLoad(NamedTuple):
    """A checkpoint beside what it is loaded into, on one rank. Holds tensors."""

    checkpoint: Checkpoint
    found: Match
    reads: list[SlabRead]
    handles: SharingHandles | None

    def close(self) -> None:
        if self.handles is not None:
            self.handles.close()


def _matched(
    storage: Storage, coordinator: Coordinator, target: str, into: Any, options: LoadOptions
) -> tuple[_OpenedLoad, list[dict[str, Any]]]:
    """Open and match on every rank; all ranks raise if the state of any does not fit."""
    # Kept beside the answer, which is exchanged as JSON and must not hold tensors.
    opened: list[_OpenedLoad] = []

    def work() -> dict[str, Any]:
        check_byte_order()
        checkpoint = open_checkpoint(storage, target)
        found = match(
            checkpoint.manifest, into, coordinator.rank, coordinator.world_size, options.selection
        )
        found.clashes += _different_twins(storage, checkpoint, found)
        # A target that clashes has no plan, and the load will raise on all ranks.
        reads = [] if found.clashes else plan_reads(checkpoint.manifest, found.targets)
        share = coordinator.world_size > 1 and options.share
        needs = needs_of(reads) if share else None
        handles = open_handles(coordinator.rank) if needs is not None else None
        opened.append(_OpenedLoad(checkpoint, found, reads, handles))
        return {
            "target": target,
            "strict": options.strict,
            "host": host_key(),
            "needs": needs,
            "offer": handles and handles.to_json(),
            "late": bool(found.deferred),
            "generation": checkpoint.generation,
            "missing": found.missing,
            "unexpected": found.unexpected,
            "clashes": found.clashes,
            "empty_dicts": found.empty_dicts,
            "unused": found.unused,
        }

    try:
        # The one exchange before reading: what `_check` refuses, and who reads what, follow from
        # it.
        answers = all_or_none(coordinator, work)
        _check(target, answers, options)
    except BaseException:
        # Another rank's error, as well as this one's: memory and pipes are of no use any more.
        for one in opened:
            one.close()
        raise
    return opened[0], answers


def _different_twins(storage: Storage, checkpoint: Checkpoint, found: Match) -> list[str]:
    """Compare what is to be loaded into one tensor under two names, and name what differs."""
    return [str(twins) for twins in found.unproven if not saved_alike(storage, checkpoint, twins)]


def _check(target: str, answers: list[dict[str, Any]], options: LoadOptions) -> None:
    # Arguments by which ranks decide from here on: with different ones, some would raise and the
    # others wait for them.
    for name in ("target", "strict"):
        told = sorted({str(answer[name]) for answer in answers})
        if len(told) > 1:
            words = {"target": "load from different paths", "strict": "disagree about `strict`"}
            raise MismatchError(f"ranks {words[name]}: {listed(told)}")
    # The checkpoint may be replaced while ranks open it: no state may be a mixture of two saves.
    generations = sorted({answer["generation"] for answer in answers})
    if len(generations) > 1:
        raise MismatchError(f"{target}: ranks see different saves here: {', '.join(generations)}")
    # A glob may match names of other ranks only, so it is unused if it is so on all of them.
    unused = set.intersection(*(set(answer["unused"]) for answer in answers))
    if unused and options.strict:
        raise MismatchError(
            f"{target}: nothing is called like {listed(sorted(map(repr, unused)))}, which `only` "
            "asks for; names are as `ls` prints them"
        )
    lists = differences(answers, strict=options.strict)
    if any(lists):
        empty_dicts = [answer["empty_dicts"] for answer in answers]
        raise MismatchError(mismatch_message(target, lists, empty_dicts), *lists)


def _reshard(found: Match, coordinator: Coordinator) -> None:
    for leaf, values in found.deferred:
        assert leaf.reshard is not None
        leaf.value = leaf.reshard(values, coordinator.rank, coordinator.world_size)
