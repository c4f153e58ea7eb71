"""Whether all ranks stand at the same place of the same stream: asked on request only."""

import hashlib

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
    mine = torch.tensor(_summary(position), dtype=torch.int64, device=message_device(group))
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    found = [tuple(row.tolist()) for row in rows]
    if len(set(found)) > 1:
        raise StateError(_say(found, dist.get_process_group_ranks(group or dist.group.WORLD)))


def _summary(position: Position) -> list[int]:
    digest = hashlib.sha256(position.words).digest()[:8]
    normal = torch.tensor(position.normal or 0.0, dtype=torch.float64).view(torch.int64)
    return [
        int.from_bytes(position.seed.to_bytes(8, "little"), "little", signed=True),
        position.index,
        int.from_bytes(digest, "little", signed=True),
        int(position.normal is not None),
        int(normal),
    ]


def message_device(group: dist.ProcessGroup | None) -> str:
    """Return a device that the group's backend sends from; on CPU where it can."""
    # NCCL alone cannot send from CPU. "cpu:gloo,cuda:nccl" can, and no kernel is waited for then.
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def _say(found: list[tuple[int, ...]], ranks: list[int]) -> str:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, row in zip(ranks, found, strict=True):
        groups.setdefault(row, []).append(rank)
    differing = {name for at, name in enumerate(_FIELDS) if len({row[at] for row in groups}) > 1}
    # The words follow from the seed and the place: named only where they alone differ.
    what = " and ".join(sorted(differing - {"words"}) or ["words"])
    parts = "; ".join(
        f"rank{'s' * (len(members) > 1)} {', '.join(map(str, members))}: seed "
        f"{row[0] % 2**64}, word {row[1]} of block {row[2] % 2**64:016x}"
        + (", a normal cached" if row[3] else "")
        for row, members in groups.items()
    )
    return (
        f"the ranks' random generators differ in their {what}: {parts}. Call torch.manual_seed "
        "with one seed on every rank, and draw the same ops on every rank"
    )
