"""Faults that befall a save while it runs: deaths, full disks, and other writers."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from typing import Any

from _processes import PATIENCE, Ended, at_operation, die, largest_file, ranks, run, start
from _systems import SMALL, WIDE, state_of
from _trials import CAUGHT, HUNG, INTACT, LOST, SILENT, Bench, Trial, after_crash, after_failure

_MAX_OPERATIONS = 80


def operations_of(bench: Bench, path: str, number: int) -> list[str]:
    """The changes that a save makes to files, in order."""

    def counted() -> list[str]:
        seen = at_operation(os.path.dirname(os.path.dirname(path)), None, die)
        bench.system.save(path, state_of(number))
        return seen

    return list(run(counted).value or [])


def _killed(bench: Bench, path: str, at: int) -> Ended:
    def work() -> None:
        at_operation(os.path.dirname(os.path.dirname(path)), at, die)
        bench.system.save(path, state_of(2))

    return run(work)


def first_save_killed(bench: Bench) -> Iterator[Trial]:
    """Kill -9 before every change of a file, where nothing was before."""
    for at, operation in enumerate(operations_of(bench, bench.path(), 2), 1):
        path = bench.path()
        _killed(bench, path, at)
        yield Trial(f"at {operation}", *after_crash(bench.load(path), None, 2))


def overwrite_killed(bench: Bench) -> Iterator[Trial]:
    """Kill -9 before every change of a file, while another checkpoint is replaced."""
    operations = operations_of(bench, bench.saved(1), 2)
    for at, operation in enumerate(operations[:_MAX_OPERATIONS], 1):
        path = bench.saved(1)
        _killed(bench, path, at)
        yield Trial(f"at {operation}", *after_crash(bench.load(path), 1, 2))
    if not operations:
        ended = run(lambda: bench.system.save(bench.saved(1), state_of(2)))
        yield Trial("refuses to replace", CAUGHT, ended.raised)


def replaced_record(bench: Bench) -> Iterator[Trial]:
    """Kill -9 after something was removed, and before the next change: hole 4."""
    operations = operations_of(bench, bench.saved(1), 2)
    for at, operation in enumerate(operations, 1):
        if at > 1 and operations[at - 2].startswith(("os.remove", "os.rename")):
            path = bench.saved(1)
            _killed(bench, path, at)
            yield Trial(f"before {operation}", *after_crash(bench.load(path), 1, 2))
    if not operations:
        yield Trial("refuses to replace", CAUGHT)


def killed_while_writing(bench: Bench) -> Iterator[Trial]:
    """Killed half way through a write, at any length of file."""
    for length in (1, 64, 500, 2_000, SMALL * 4, WIDE, WIDE * 2, WIDE * 4):
        path = bench.saved(1)

        def work(length: int = length, path: str = path) -> None:
            largest_file(length, deadly=True)
            bench.system.save(path, state_of(2))

        ended = run(work)
        if ended.how == "raised":
            verdict = after_failure(ended, bench.load(path), 1, 2)
        else:
            verdict = after_crash(bench.load(path), 1, 2)
        yield Trial(f"byte {length} of a file", *verdict)


def disk_full(bench: Bench) -> Iterator[Trial]:
    """The larger of two files cannot be written; a system that uses threads fails in one only."""
    for length in (SMALL * 8, WIDE, WIDE * 4 - 1):
        path = bench.saved(1)

        def work(length: int = length, path: str = path) -> None:
            largest_file(length, deadly=False)
            bench.system.save(path, state_of(2))

        ended = run(work)
        yield Trial(f"beyond {length} bytes", *after_failure(ended, bench.load(path), 1, 2))


def two_writers(bench: Bench) -> Iterator[Trial]:
    """One save stops before every change of a file while another of the same path goes through."""
    for fresh in (True, False):
        operations = operations_of(bench, bench.path() if fresh else bench.saved(1), 2)
        for at, operation in enumerate(operations, 1):
            path = bench.path() if fresh else bench.saved(1)
            loaded, succeeded = _interleaved(bench, path, at, bench.system.save)
            verdict = _of_two(loaded, succeeded, fresh=fresh)
            yield Trial(f"one waits at {operation}", *verdict)
        if not operations:
            yield Trial("refuses to replace", CAUGHT)


def two_first_writers(bench: Bench) -> Iterator[Trial]:
    """The same where nothing was before, and neither was told to replace: one must be refused."""
    for at, operation in enumerate(operations_of(bench, bench.path(), 2), 1):
        loaded, succeeded = _interleaved(bench, bench.path(), at, bench.system.save_new)
        verdict = _of_two(loaded, succeeded, fresh=True)
        if len(succeeded) == 2 and verdict[0] == INTACT:
            verdict = SILENT, f"both were reported as saved; only save {loaded.value} is there"
        yield Trial(f"one waits at {operation}", *verdict)


def _interleaved(
    bench: Bench, path: str, at: int, save: Callable[[str, dict[str, Any]], None]
) -> tuple[Ended, list[int]]:
    """What loads after two saves, and which of them were reported as done."""
    stopped, resume = os.pipe(), os.pipe()

    def wait_there() -> None:
        os.write(stopped[1], b"x")
        os.read(resume[0], 1)

    def first() -> None:
        at_operation(os.path.dirname(os.path.dirname(path)), at, wait_there)
        save(path, state_of(2))

    one = start(first)
    os.read(stopped[0], 1)
    two = start(lambda: save(path, state_of(3)))
    # It goes through, or (rightly) waits for the one that stopped.
    _until_done(two.answer, 1.0)
    os.write(resume[1], b"x")
    ended = {2: one.join(), 3: two.join()}
    for end in (*stopped, *resume):
        os.close(end)
    return bench.load(path), [n for n, end in ended.items() if end.how == "returned"]


def _of_two(loaded: Ended, succeeded: list[int], *, fresh: bool) -> tuple[str, str]:
    if loaded.how != "returned":
        return (LOST, loaded.raised) if succeeded or not fresh else (CAUGHT, loaded.raised)
    if loaded.value in succeeded:
        return (INTACT, "") if len(succeeded) == 2 else (CAUGHT, "one of them was told")
    if loaded.value == 1 and not succeeded:
        return CAUGHT, "both were told"
    return SILENT, f"loads {loaded.value or 'a mixture'}, though {succeeded} were reported as saved"


def _until_done(descriptor: int, seconds: float) -> None:
    select.select([descriptor], [], [], seconds)


def _two_ranks(bench: Bench, path: str, work: Callable[[int], object]) -> list[Ended]:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # A store of its own every time: what another group left in one would be taken for an answer.
    bench.groups += 1
    return ranks(2, f"{bench.folder}/store-{bench.groups}", work)


def rank_dies(bench: Bench) -> Iterator[Trial]:
    """One of two ranks is gone before it has told the other that it wrote its part."""
    for where in ("before it saves", "at its first change of a file"):
        path = bench.saved(1)

        def work(rank: int, where: str = where, path: str = path) -> None:
            if rank == 1 and where == "before it saves":
                die()
            if rank == 1:
                at_operation(os.path.dirname(os.path.dirname(path)), 1, die)
            bench.system.save(path, {**state_of(2), f"own{rank}": state_of(2)["v"]})

        survivor = _two_ranks(bench, path, work)[0]
        if survivor.how == "hung":
            verdict, because = after_crash(bench.load(path), 1, 2)
            words = f"the other rank still waited after {PATIENCE} s"
            yield Trial(where, HUNG, words) if verdict == INTACT else Trial(where, verdict, because)
        else:
            yield Trial(where, *after_failure(survivor, bench.load(path), 1, 2))


def rank_local(bench: Bench) -> Iterator[Trial]:
    """Both ranks save another value under one name: their random state, their place in the data."""
    import torch

    path = bench.path()

    def save(rank: int) -> None:
        bench.system.save(path, {"rng": torch.full((4,), float(rank))})

    def load(rank: int) -> list[float]:
        return list(bench.system.load(path, {"rng": torch.zeros(4)})["rng"].tolist())

    yield _outcome(_two_ranks(bench, path, save), lambda: _two_ranks(bench, path, load),
                   [[0.0] * 4, [1.0] * 4])  # fmt: skip


def interleaved_shards(bench: Bench) -> Iterator[Trial]:
    """A tensor whose ranks hold every second part: FSDP over tensor parallelism makes them."""
    path = bench.path()

    def tensor(rank: int, *, fill: bool) -> object:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.placement_types import _StridedShard

        whole = torch.arange(12.0)
        parts = [part.chunk(2)[rank] for part in whole.chunk(3)]
        local = torch.cat(parts) if fill else torch.zeros(6)
        return DTensor.from_local(
            local, init_device_mesh("cpu", (2,)), [_StridedShard(0, split_factor=3)],
            shape=whole.shape, stride=whole.stride(), run_check=False,
        )  # fmt: skip

    def load(rank: int) -> list[float]:
        into = {"w": tensor(rank, fill=False)}
        return list(bench.system.load(path, into)["w"].to_local().tolist())

    def save(rank: int) -> None:
        bench.system.save(path, {"w": tensor(rank, fill=True)})

    expected = [[0.0, 1.0, 4.0, 5.0, 8.0, 9.0], [2.0, 3.0, 6.0, 7.0, 10.0, 11.0]]
    yield _outcome(_two_ranks(bench, path, save), lambda: _two_ranks(bench, path, load), expected)


def _outcome(
    saved: list[Ended], load: Callable[[], list[Ended]], expected: list[list[float]]
) -> Trial:
    if any(end.how != "returned" for end in saved):
        return Trial("save", CAUGHT, f"refused: {saved[0].raised}")
    loaded = load()
    if any(end.how != "returned" for end in loaded):
        why = next(end.raised or end.how for end in loaded if end.how != "returned")
        return Trial("load", SILENT, f"save() succeeded; loading then: {why}")
    values = [end.value for end in loaded]
    if values == expected:
        return Trial("load", INTACT)
    return Trial("load", SILENT, f"the ranks get {values}, not {expected}")
