"""Checks what runs beside the step: collectives, gathers, offload, saves; other streams."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tools.first_gpu.cases import Case, CaseResult, alike, both, holds, same_bits
from tools.first_gpu.models import TRAININGS, Training, parallelised, step_of, train

ZERO = "dp=2 zero 3"
OFFLOADS: dict[str, dict[str, Any]] = {
    "zero 3": {"zero": 3, "offload": True, "reduce_ahead": 1},
    "zero 3, optimizer": {"zero": 3, "offload": "optimizer"},
    "zero 2": {"zero": 2, "offload": True},
    "zero 1": {"zero": 1, "offload": True},
}


def cases(device: torch.device) -> list[Case]:
    """Collectives, then what ZeRO overlaps, then checkpoints."""
    return [
        Case("collectives on their way while it computes", _asynchronous),
        Case("gathered ahead and reduced behind", _overlapped),
        *(
            Case(f"offload, {name}", partial(_offloaded, words), ("cuda",))
            for name, words in OFFLOADS.items()
        ),
        Case("asynchronous saves while it trains", _saved_behind),
        Case("training on a stream of its own", _on_a_stream, ("cuda",)),
        Case("saved on a stream of its own", _saved_on_a_stream, ("cuda",)),
        Case("simulated ranks on a stream of their own", _ranks_on_a_stream, ("cuda",)),
        Case("buckets on their way in backward", _reducer),
        Case("microbatches in stages, with messages under way", _stages),
    ]


def _busy(device: torch.device, products: int = 4) -> None:
    """Work of some milliseconds each on a GPU, so that what does not wait is early."""
    size = 4096 if device.type == "cuda" else 64
    x = torch.ones(size, size, device=device)
    for _ in range(products):
        x = x @ x / size


@contextmanager
def _stream(device: torch.device) -> Iterator[None]:
    """A stream of its own, behind the current one and before what comes after."""
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream(device).wait_stream(side)


def _asynchronous(device: torch.device) -> CaseResult:
    """Each collective, begun behind long work and waited for behind more."""
    import vescale_comm as comm
    from vescale_comm import simulate

    def body(rank: int, world_size: int) -> dict[str, Any]:
        x = torch.arange(60_000.0, device=device)
        mine = x * (rank + 1)
        total = x * sum(range(1, world_size + 1))
        pieces = [mine[:20_000] + at for at in range(world_size)]
        _busy(device)
        mine = mine * 1  # behind the work
        under_way: list[tuple[str, Any, Any]] = [
            ("all_reduce", comm.all_reduce(mine, async_op=True), total),
            ("ordered", comm.all_reduce(mine, order="rank", async_op=True), total),
            ("all_gather", comm.all_gather(mine, async_op=True),
             torch.cat([x * (at + 1) for at in range(world_size)])),
            ("reduce_scatter", comm.reduce_scatter(mine, async_op=True),
             total.chunk(world_size)[rank]),
            ("broadcast", comm.broadcast(mine, source=1, async_op=True), 2 * x),
        ]  # fmt: skip
        exchanged: Any = comm.all_to_all(pieces, shapes=[pieces[0].shape] * world_size,
                                         async_op=True)  # fmt: skip
        _busy(device)
        pairs = {name: (expected, pending.wait()) for name, pending, expected in under_way}
        for at, one in enumerate(exchanged.wait()):
            pairs[f"all_to_all from {at}"] = (x[:20_000] * (at + 1) + rank, one)
        return pairs

    found = simulate(3)(body)
    return same_bits(
        {f"rank {r}: {k}": p for r, one in enumerate(found) for k, p in one.items()},
        "what a collective that is waited for gives",
    )


def _trained(words: dict[str, Any], device: torch.device, sizes: Any = None) -> list[Any]:
    """What the ranks of a ZeRO model have after its steps."""
    from vescale_comm import simulate

    of = TRAININGS[ZERO]
    changed = Training(sizes or of.sizes, {**of.words, **words})

    def body(rank: int, world_size: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return train(parallelised(changed, device), step_of(changed), device)

    found: list[Any] = simulate(changed.ranks)(body)
    return found


def _overlapped(device: torch.device) -> CaseResult:
    """The same bits however much is gathered ahead and on its way behind."""
    expected = _trained({"prefetch": 0, "reduce_ahead": 0}, device)
    pairs: dict[str, Any] = {}
    for words in ({"prefetch": 1, "reduce_ahead": 1}, {"prefetch": 2, "reduce_ahead": 3}, {}):
        for rank, found in enumerate(_trained(words, device)):
            name = str(words) if words else "auto"
            pairs |= {f"{name}, rank {rank}: {k}": (expected[rank][k], v) for k, v in found.items()}
    return same_bits(pairs, "the bits of prefetch=0, reduce_ahead=0")


def _offloaded(words: dict[str, Any], device: torch.device) -> CaseResult:
    """Parameters and states in pinned memory of the host, beside the same on the device."""
    plain = {name: one for name, one in words.items() if name not in ("offload", "reduce_ahead")}
    pairs: dict[str, Any] = {}
    expected = _trained(plain, device)
    for rank, found in enumerate(_trained(words, device)):
        pairs |= {f"rank {rank}: {k}": (expected[rank][k], v) for k, v in found.items()}
    # The host's optimizer rounds otherwise than the device's.
    return both(alike(pairs, expected="within 1e-05 of the device's"), _pinned(words, device))


def _pinned(words: dict[str, Any], device: torch.device) -> CaseResult:
    from vescale_comm import simulate

    def body(rank: int, world_size: int) -> list[str]:
        model = parallelised(Training({"dp": 2}, {**TRAININGS[ZERO].words, **words}), device)
        stored: list[tuple[str, Any]] = [one for one in model.named_parameters() if one[1].ndim]
        own = {name: one.to_local() for name, one in stored}
        return [name for name, one in own.items() if one.numel() and not one.is_pinned()]

    loose = [name for names in simulate(2)(body) for name in names]
    return holds("in pinned memory", not loose, f"not pinned: {loose[:3]}" if loose else "pinned")


def _saved_behind(device: torch.device) -> CaseResult:
    """Saves that go on while training writes what is saved."""
    from vescale_ckpt import Staging, async_save, read

    staging, pairs = Staging(), {}
    weights = {f"w{at}": torch.zeros(300_001, device=device) for at in range(4)}
    weights["strided"] = torch.zeros(500, 600, device=device).t()[::2]
    with tempfile.TemporaryDirectory() as folder:
        handles = []
        for step in range(3):
            _busy(device)
            for one in weights.values():
                one.add_(1)
            path = os.path.join(folder, f"step-{step}")
            handles.append((step, path, async_save(path, weights, staging=staging)))
            for one in weights.values():
                # At once, as the next step does.
                one.mul_(1)
        for step, path, handle in handles:
            handle.wait()
            for name, one in read(path).items():
                expected = torch.full(tuple(one.shape), step + 1.0)
                pairs[f"step {step}, {name}"] = (expected, one)
    return same_bits(pairs, "the state when it was called")


def _on_a_stream(device: torch.device) -> CaseResult:
    """Training under `torch.cuda.stream`: the bits of the default stream."""
    expected = _alone(device)
    with _stream(device):
        _busy(device)
        found = _alone(device)
    return same_bits({key: (one, found[key]) for key, one in expected.items()},
                     "the default stream's bits")  # fmt: skip


def _alone(device: torch.device) -> dict[str, Tensor]:
    """A ZeRO model on a mesh of one rank, without a simulation."""
    of = Training({"dp": 1}, TRAININGS[ZERO].words)
    try:
        torch.manual_seed(0)
        return train(parallelised(of, device), step_of(of), device)
    finally:
        torch.distributed.destroy_process_group()


def _saved_on_a_stream(device: torch.device) -> CaseResult:
    """A save under `torch.cuda.stream`, behind work that is not done: what it says it saved."""
    from vescale_ckpt import read, save

    pairs = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(4):
            weights = {f"w{at}": torch.zeros(700_001, device=device) for at in range(8)}
            torch.cuda.synchronize()
            path = os.path.join(folder, f"step-{turn}")
            with _stream(device):
                _busy(device, 40)
                for one in weights.values():
                    one.add_(turn + 1)
                save(path, weights)
            for name, one in read(path).items():
                pairs[f"turn {turn}, {name}"] = (torch.full((700_001,), turn + 1.0), one)
    return same_bits(pairs, "the state when it was called")


def _ranks_on_a_stream(device: torch.device) -> CaseResult:
    """Ranks, each on a stream of its own, exchange what is not done yet."""
    from vescale_comm import all_reduce, simulate

    def body(rank: int, world_size: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        for turn in range(3):
            side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                if rank == turn % world_size:
                    _busy(device, 20)
                mine = torch.full((50_000,), float(rank + turn), device=device)
                total = all_reduce(mine)
                # Written again at once: whoever reads late reads this.
                mine.fill_(-1)
                expected = torch.full_like(total, sum(at + turn for at in range(world_size)))
                pairs[f"turn {turn}"] = (expected, total)
        torch.cuda.synchronize()
        return pairs

    found = simulate(3)(body)
    return same_bits(
        {f"rank {r}: {k}": p for r, one in enumerate(found) for k, p in one.items()},
        "sums of what each rank had written",
    )


def _reducer(device: torch.device) -> CaseResult:
    """A reducer that sends each bucket when it is full, put in the order of a backward."""
    from vescale_comm import Bucket, Reducer, as_group, simulate

    shapes = [(300, 7), (11,), (), (1000,), (40, 40)]

    def body(rank: int, world_size: int) -> dict[str, Any]:
        bucket = Bucket.plan(shapes, [torch.float32] * len(shapes), cap_bytes=4000)
        reducer = Reducer(bucket, as_group(None))
        for at in reversed(range(len(shapes))):
            _busy(device)
            reducer.put(at, torch.full(shapes[at], float(at + rank), device=device))
        totals = reducer.wait()
        return {
            str(at): (torch.full(shapes[at], float(world_size * at + 1), device=device), one)
            for at, one in enumerate(totals)
        }

    found = simulate(2)(body)
    return same_bits(
        {f"rank {r}: {k}": p for r, one in enumerate(found) for k, p in one.items()}, "the sums"
    )


def _stages(device: torch.device) -> CaseResult:
    """Schedules whose messages are under way while other microbatches compute: each the same."""
    from vescale_comm import simulate

    found: dict[str, list[Any]] = {}
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        words = {"stages": "blocks.*", "schedule": schedule, "microbatches": 4}
        of = Training({"pp": 2}, words, microbatches=4)

        def body(rank: int, world_size: int, of: Training = of) -> dict[str, Tensor]:
            torch.manual_seed(0)
            return train(parallelised(of, device), step_of(of), device)

        found[schedule] = simulate(2)(body)
    expected = found.pop("gpipe")
    pairs = {
        f"{name}, rank {rank}: {key}": (value, one[key])
        for name, ranks in found.items()
        for rank, one in enumerate(ranks)
        for key, value in expected[rank].items()
    }
    return alike(pairs, expected="within 1e-05 of gpipe")
