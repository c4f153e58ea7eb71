"""Compares with a few bytes whether all ranks hold the same, and names who differs.

Every rank sees the same digests and decides alike, so all raise or none does. The digests have a
fixed size, so that lists of different lengths are compared too and no rank waits for the rest of a
list that another rank does not have. Text travels only when there is something to tell.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import Group, as_group, group_of
from vescale_comm.agreement import broadcast_text, digest, gather_numbers, named, several_ranks

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
    group = everyone(mesh)
    start_same(facts, peers=peers, head=head, advice=advice, group=group, at_once=True)()


def start_same(
    facts: Facts,
    *,
    peers: Sequence[int],
    head: str,
    advice: Mapping[str, str],
    group: Group | None = None,
    told: int = 0,
    at_once: bool = False,
) -> Callable[[], list[int]]:
    """Begin what `require_same` does; returns what waits for the others, and raises.

    Until that is called, once, nothing may be sent that only ranks which hold the same expect.
    Ranks need not agree on what they do meanwhile.

    Args:
        facts: as in `require_same`.
        peers: as in `require_same`.
        head: as in `require_same`.
        advice: as in `require_same`.
        group: of the ranks that compare, see `everyone`.
        told: a number that ranks need not share. What is returned gives that of every rank.
        at_once: wait for the others here; a rank that calls this alone is then named by what it
            called, and not by a collective that the others never come to.
    """
    if not several_ranks(group):
        return lambda: [told]
    held = [list(peers), *map(dict, facts.values())]
    own = [told, *(digest(json.dumps(one)) for one in held)]
    wait = _found(own, group) if at_once else gather_numbers(own, group, async_op=True).wait

    def require() -> list[int]:
        found = wait()
        variants = _variants([row[1:] for row in found], as_group(group).ranks)
        if not all(len(of_team) == 1 for of_team in variants):
            _refuse(facts, variants, group, head, advice)
        return [row[0] for row in found]

    return require


def _found(own: list[int], group: Group | None) -> Callable[[], list[tuple[int, ...]]]:
    found = gather_numbers(own, group)
    return lambda: found


def require_alike(told: Sequence[Facts], *, head: str, advice: Mapping[str, str]) -> None:
    """Raise what `require_same` does, of facts that every rank has sent to all others.

    Args:
        told: by rank, all of the same sections. It is the same on every rank.
        head: as in `require_same`.
        advice: as in `require_same`.
    """
    found: dict[str, list[str]] = {}
    for section in told[0]:
        holders: dict[str, list[int]] = {}
        for rank, facts in enumerate(told):
            holders.setdefault(json.dumps(facts[section]), []).append(rank)
        said = [(ranks, told[ranks[0]][section]) for ranks in holders.values()]
        found[section] = _differences_of(section, said) if len(said) > 1 else []
    if any(found.values()):
        raise _error(found, head, advice)


def _refuse(
    facts: Facts,
    variants: list[list[list[int]]],
    group: Group | None,
    head: str,
    advice: Mapping[str, str],
) -> NoReturn:
    """Say what differs, on every rank."""
    found = {section: _differences(section, facts, variants, group) for section in facts}
    raise _error(found, head, advice)


def _error(
    found: Mapping[str, list[str]], head: str, advice: Mapping[str, str]
) -> DisagreementError:
    lines = [line for of_section in found.values() for line in of_section]
    shown = lines[:_SHOWN_DIFFERENCES]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more differences")
    first = next(section for section, of_section in found.items() if of_section)
    return DisagreementError("\n  - ".join([head, *shown]) + f"\n{advice[first]}")


def everyone(mesh: DeviceMesh | None) -> Group | None:
    """Return the group of all ranks of a mesh; None where these are all processes."""
    # Not a group of its own where it is the world: a mesh of all processes may be one of several,
    # and what they compare goes the same way whichever of them asks.
    if mesh is None or not dist.is_initialized() or mesh.mesh.numel() == dist.get_world_size():
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
        found = _differences_of(section, told)
        lines += found
        if found and len(of_team) > _SHOWN_VARIANTS:
            rest = [rank for ranks in of_team[_SHOWN_VARIANTS:] for rank in ranks]
            lines.append(f"{section}: {named(sorted(rest))} not told")
    return lines


def _differences_of(section: str, told: Sequence[tuple[list[int], Mapping[str, str]]]) -> list[str]:
    """Return a line for each name whose value differs among ranks that say the same."""
    # What cannot be described first: it is why all else of that rank is not there.
    everything = dict.fromkeys(name for _, values in told for name in values)
    names = sorted(everything, key=lambda name: name != UNDESCRIBED)
    found = {name: one for name in names if (one := _difference(name, told))}
    orders = {tuple(values): ranks for ranks, values in told}
    if not found and len(orders) > 1:
        # Optimizers and buckets go by the order of parameters, so it is a difference as well.
        return [f"{section}: another order on {named(sorted([*orders.values()][-1]))}"]
    return [f"{section} '{name}': {one}" for name, one in found.items()]


def _difference(name: str, told: Sequence[tuple[list[int], Mapping[str, str]]]) -> str:
    """Return who has which value, or nothing where all facts are the same."""
    holders: dict[str, list[int]] = {}
    for ranks, values in told:
        holders.setdefault(values.get(name, "not there"), []).extend(ranks)
    if len(holders) == 1:
        return ""
    return "; ".join(f"{value} on {named(sorted(ranks))}" for value, ranks in holders.items())


def _text_of(sender: int, section: Mapping[str, str], group: Group | None) -> dict[str, str]:
    """Return what one rank holds, on every rank."""
    told: dict[str, str] = json.loads(broadcast_text(json.dumps(dict(section)), sender, group))
    return told


def ranks_that_hold(value: object) -> list[int]:
    """Return the ranks that pass the same value as this one; a value that JSON can write."""
    found = gather_numbers([digest(json.dumps(value))])
    mine = found[dist.get_rank() if several_ranks() else 0]
    return [rank for rank, one in enumerate(found) if one == mine]


def world_ranks() -> list[int]:
    """Return all ranks of the default process group."""
    return list(range(dist.get_world_size())) if dist.is_initialized() else [0]


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of the elements, in row-major order."""
    return zlib.crc32(element_bytes(tensor))


def element_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements, in row-major order, of any dtype."""
    # Sparse tensors and lazy conjugates have no bytes that could be seen as they are.
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    flat = dense.resolve_conj().resolve_neg().contiguous().flatten().cpu()
    # A single element may have any stride, and is seen as bytes with that of one alone.
    flat = flat.as_strided(flat.shape, (1,))
    # numpy has no bfloat16 and no float8; every dtype can be seen as bytes.
    return flat.view(torch.uint8).numpy().data
