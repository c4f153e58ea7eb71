"""Whether all ranks hold the same, found out with a few bytes, and who differs where they do not.

Every rank sees the same digests and decides alike, so all raise or none does. The digests have a
fixed size, so that lists of different lengths are compared too and no rank waits for the rest of a
list that another rank does not have. Text travels only when there is something to tell.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import Group, explained_failures, group_of

from vescale_parallel._common.messages import numbers
from vescale_parallel._errors import DisagreementError

Facts = Mapping[str, Mapping[str, str]]
"""Section to name to value: what is compared, in the words that an error shall use."""

UNDESCRIBED: Final = "cannot be described"
"""The one fact of a section that could not be asked for: why, in place of all others."""

_SHOWN_DIFFERENCES: Final = 8
_SHOWN_VARIANTS: Final = 4
"""How many ranks that hold different things tell what they hold: messages, and traffic, end."""


def require_same(
    facts: Facts,
    *,
    peers: Sequence[int],
    head: str,
    advice: Mapping[str, str],
    mesh: DeviceMesh | None = None,
) -> None:
    """Raise on every rank, naming ranks and values, unless peers hold the same.

    All ranks of the mesh, or of the default process group, call it with the same sections. One
    collective of a few bytes for each section; more only where something differs.

    Args:
        facts: what this rank holds.
        peers: the ranks that must hold the same, this one among them.
        head: the beginning of the message.
        advice: by section, what to do; that of the first section that differs ends the message.
        mesh: whose ranks compare; None: all processes. What happens while a model runs is for its
            mesh: others may hold another model, which runs at other times or not at all.

    Raises:
        DisagreementError: on every rank, also on those whose own peers agree.
    """
    if not several_ranks():
        return
    group = _group(mesh)
    if group is not None and group.size == 1:
        return
    digests = [_digest(list(peers)), *(_digest(dict(section)) for section in facts.values())]
    told = gather(torch.tensor(digests, device=_device(group)), group)
    rows = [tuple(row.tolist()) for row in told]
    variants = _variants(rows, world_ranks() if group is None else group.ranks)
    if all(len(of_team) == 1 for of_team in variants):
        return
    found = {section: _differences(section, facts, variants, group) for section in facts}
    lines = [line for of_section in found.values() for line in of_section]
    shown = lines[:_SHOWN_DIFFERENCES]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more differences")
    first = next(section for section, of_section in found.items() if of_section)
    raise DisagreementError("\n  - ".join([head, *shown]) + f"\n{advice[first]}")


def _group(mesh: DeviceMesh | None) -> Group | None:
    """The ranks of a mesh; None where these are all processes."""
    if mesh is None or mesh.mesh.numel() == dist.get_world_size():
        return None
    return group_of(mesh, tuple(range(mesh.ndim)))


def _variants(rows: Sequence[tuple[int, ...]], ranks: Sequence[int]) -> list[list[list[int]]]:
    """By set of peers, the ranks that hold the same, those that hold the most usual thing first."""
    teams: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for rank, row in sorted(zip(ranks, rows, strict=True)):
        teams.setdefault(row[0], {}).setdefault(row, []).append(rank)
    # Sorting is stable: of two that equally many ranks have, that of the lower rank comes first.
    return [sorted(team.values(), key=lambda ranks: -len(ranks)) for team in teams.values()]


def _differences(
    section: str, facts: Facts, variants: list[list[list[int]]], group: Group | None
) -> list[str]:
    """Return a line for each name whose value differs somewhere; a collective of all ranks."""
    lines = []
    for of_team in variants:
        if len(of_team) == 1:
            continue
        # The lowest rank of each variant speaks for the others, and everybody hears it.
        shown = of_team[:_SHOWN_VARIANTS]
        told = [(ranks, _text_of(ranks[0], facts[section], group)) for ranks in shown]
        # What cannot be described first: it is why all else of that rank is not there.
        everything = dict.fromkeys(name for _, values in told for name in values)
        names = sorted(everything, key=lambda name: name != UNDESCRIBED)
        found = {name: one for name in names if (one := _difference(name, told))}
        lines += [f"{section} '{name}': {one}" for name, one in found.items()]
        orders = {tuple(values): ranks for ranks, values in told}
        if not found and len(orders) > 1:
            # Optimizers and buckets go by the order of parameters, so it is a difference as well.
            lines.append(f"{section}: another order on {_ranks([*orders.values()][-1])}")
        if found and len(of_team) > _SHOWN_VARIANTS:
            rest = [rank for ranks in of_team[_SHOWN_VARIANTS:] for rank in ranks]
            lines.append(f"{section}: {_ranks(rest)} not told")
    return lines


def _difference(name: str, told: Sequence[tuple[list[int], Mapping[str, str]]]) -> str:
    """Return who has which value, or nothing where all that was told is the same."""
    holders: dict[str, list[int]] = {}
    for ranks, values in told:
        holders.setdefault(values.get(name, "not there"), []).extend(ranks)
    if len(holders) == 1:
        return ""
    return "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in holders.items())


def _ranks(ranks: Sequence[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + numbers(sorted(ranks))


def _digest(value: object) -> int:
    """64 bits of a value that JSON can write, as a signed number, for int64 tensors."""
    text = json.dumps(value).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _text_of(sender: int, section: Mapping[str, str], group: Group | None) -> dict[str, str]:
    """Return what one rank holds, on every rank."""
    told: dict[str, str] = json.loads(broadcast_text(json.dumps(dict(section)), sender, group))
    return told


def broadcast_text(text: str, sender: int, group: Group | None = None) -> str:
    """Return the text that `sender` passes, on every rank; what others pass is not looked at.

    Args:
        text: what this rank would say.
        sender: the rank that is heard, counted over all processes.
        group: who hears; None: all processes.
    """
    carrier = None if group is None else group.process_group
    device = _device(group)
    mine = text.encode() if dist.get_rank() == sender else b""
    length = torch.tensor([len(mine)], device=device)
    # Its length first: the others cannot know how much they have to receive.
    with explained_failures("broadcast", length):
        dist.broadcast(length, sender, group=carrier)
    padded = bytearray(mine.ljust(int(length.item()), b"\0"))
    sent = torch.frombuffer(padded, dtype=torch.uint8).to(device) if padded else length[:0]
    with explained_failures("broadcast", sent):
        dist.broadcast(sent, sender, group=carrier)
    return bytes(sent.cpu().tolist()).decode()


def several_ranks() -> bool:
    """Return whether there are other ranks; those of the `fake` backend do not exist."""
    started = dist.is_initialized() and dist.get_world_size() > 1
    return started and dist.get_backend() != "fake"


def gather(mine: Tensor, group: Group | None = None) -> list[Tensor]:
    """Return one tensor of the same shape from every rank of a group, or of all, on the CPU."""
    size = dist.get_world_size() if group is None else group.size
    received = [torch.empty_like(mine) for _ in range(size)]
    with explained_failures("all_gather", mine):
        dist.all_gather(received, mine, group=None if group is None else group.process_group)
    return [one.cpu() for one in received]


def gather_flags(mine: bool, mesh: DeviceMesh | None = None) -> list[bool]:
    """Return one yes or no from every rank of a mesh, or of all processes, in rank order."""
    if not several_ranks():
        return [mine]
    group = _group(mesh)
    said = torch.tensor([mine], device=_device(group)).int()
    found = [bool(one.item()) for one in gather(said, group)]
    if group is None:
        return found
    return [one for _, one in sorted(zip(group.ranks, found, strict=True))]


def text_of_first(text: str, mesh: DeviceMesh | None) -> str:
    """Return what the lowest rank of a mesh, or of all processes, passes, on all of them."""
    if not several_ranks():
        return text
    group = _group(mesh)
    return broadcast_text(text, 0 if group is None else min(group.ranks), group)


def ranks_that_hold(value: object) -> list[int]:
    """Return the ranks that pass the same value as this one; a value that JSON can write."""
    mine = _digest(value)
    found = gather(torch.tensor([mine], device=_device()))
    return [rank for rank, one in enumerate(found) if int(one.item()) == mine]


def world_ranks() -> list[int]:
    """Return all ranks of the default process group."""
    return list(range(dist.get_world_size())) if dist.is_initialized() else [0]


def _device(group: Group | None = None) -> str:
    """Return a device that a group, or the default one, sends from: the same on every rank."""
    if group is not None:
        return "cpu" if "cpu" in group.backends else next(iter(group.backends))
    # As "cpu:gloo,cuda:nccl": facts on the host then never wait for work on the device.
    return "cpu" if "cpu:" in dist.get_backend_config() else "cuda"


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of the elements, in row-major order."""
    return zlib.crc32(element_bytes(tensor))


def element_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements, in row-major order, of any dtype."""
    # Sparse tensors and lazy conjugates have no bytes that could be seen as they are.
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    flat = dense.resolve_conj().resolve_neg().contiguous().flatten().cpu()
    # numpy has no bfloat16 and no float8; every dtype can be seen as bytes.
    return flat.view(torch.uint8).numpy().data
