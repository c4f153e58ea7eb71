"""Compares on request whether all ranks are at the same position of the same stream.

`gather_numbers`, `by_ranks` and `message_device` are those of `vescale_comm.agreement`, in name and
form: this package imports no other, so it has its own.
"""

import hashlib
from collections.abc import Hashable, Iterable, Sequence

import torch
import torch.distributed as dist

from vescale_rng._cpu import generator_state as cpu_state
from vescale_rng._cpu.generator_state import Position
from vescale_rng._draw.devices import cpu_generator
from vescale_rng._errors import StateError

# seed, index, digest of the words, whether a normal waits, its bits; each as one int64.
_FIELDS = ("seed", "place", "words", "cached normal", "cached normal")


def check_in_step(
    generator: torch.Generator | None = None, group: dist.ProcessGroup | None = None
) -> None:
    """Raise on every rank, naming the ranks, unless their generators are in the same state.

    A collective of 40 bytes for each rank: every rank of the group must call it.

    Args:
        generator: a CPU generator; None is torch's default.
        group: whose ranks are compared; None is the default process group. Without
            `torch.distributed`, or with one rank, there is nothing to compare.

    Raises:
        StateError: seeds or places differ. The message tells which ranks have which.
    """
    position = cpu_state.read(cpu_generator(generator))
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    # Digests, not the words: 40 bytes from each rank whatever the world's size.
    found = gather_numbers(_summary(position), group)
    if len(set(found)) > 1:
        raise StateError(_say(found, dist.get_process_group_ranks(group or dist.group.WORLD)))


def _summary(position: Position) -> list[int]:
    digest = hashlib.sha256(position.words).digest()[:8]
    normal = torch.tensor(position.normal or 0.0, dtype=torch.float64, device="cpu").view(
        torch.int64
    )
    return [
        int.from_bytes(position.seed.to_bytes(8, "little"), "little", signed=True),
        position.index,
        int.from_bytes(digest, "little", signed=True),
        int(position.normal is not None),
        int(normal),
    ]


def gather_numbers(
    numbers: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[tuple[int, ...]]:
    """Return the numbers of every member, in the order of the group. A collective.

    Args:
        numbers: signed, of 64 bits, and equally many on every member.
        group: who is asked; None: all processes.
    """
    own = torch.tensor(numbers, dtype=torch.int64, device=message_device(group))
    received = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, own, group=group)
    return [tuple(row.tolist()) for row in received]


def by_ranks(said: Iterable[Hashable], ranks: Iterable[int]) -> str:
    """Write who says what: `rank 0: 4 rows; ranks 1, 2: 8 rows`.

    Args:
        said: by every rank.
        ranks: in the same order.
    """
    holders: dict[Hashable, list[str]] = {}
    for rank, one in zip(ranks, said, strict=True):
        holders.setdefault(one, []).append(str(rank))
    return "; ".join(
        f"rank{'s' * (len(of_one) > 1)} {', '.join(of_one)}: {one}"
        for one, of_one in holders.items()
    )


def message_device(group: dist.ProcessGroup | None = None) -> str:
    """Return the type of device that members send numbers from: the same on every member."""
    # NCCL alone cannot send from CPU. "cpu:gloo,cuda:nccl" can, and no kernel is waited for then.
    # As text, of a group that was made as "nccl" or as "cuda:nccl".
    devices = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return "cpu" if "cpu" in devices else devices[0]


def _say(found: list[tuple[int, ...]], ranks: list[int]) -> str:
    differing = {name for at, name in enumerate(_FIELDS) if len({row[at] for row in found}) > 1}
    # The words follow from the seed and the place: named only where they alone differ.
    what = " and ".join(sorted(differing - {"words"}) or ["words"])
    parts = by_ranks(map(_place, found), ranks)
    return (
        f"the ranks' random generators differ in their {what}: {parts}. Call torch.manual_seed "
        "with one seed on every rank, and draw the same ops on every rank"
    )


def _place(row: tuple[int, ...]) -> str:
    seed, index, words, cached, bits = row
    # Its bits are said only where ranks could differ in nothing else that is shown.
    normal = f", a normal cached ({bits % 2**64:016x})" if cached else ""
    return f"seed {seed % 2**64}, word {index} of block {words % 2**64:016x}{normal}"
