"""Gathers what each rank reports on every rank: all then go on, or all raise the same error.

    settings = {"option": {"rate": repr(rate), "batch": repr(batch)}}
    require_same(Facts(settings, "the ranks differ:", "Pass the same on every rank."), group)

Every function that sends is a collective of the members of a group, and returns the same on each of
them. So whatever follows from the result alone is decided alike: no member waits for one that has
raised. These are checks beside a program: `trace` does not see them.
"""

import json
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from typing import Any, Final, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_comm._engine.failures import explained_failures, failures_in_words
from vescale_comm._engine.handles import Pending, ready
from vescale_comm._errors import CommError, CommMismatchError
from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._torch.ranks import compact, named

__all__ = [
    "UNDESCRIBED",
    "Facts",
    "broadcast_text",
    "by_ranks",
    "compact",
    "digest",
    "gather_bytes",
    "gather_numbers",
    "gather_texts",
    "message_device",
    "named",
    "require_alike",
    "require_same",
    "require_success",
    "several_ranks",
    "start_same",
]

# Of a text: its length, and what of it goes along.
_LENGTH_BYTES = 8
_FIRST_BYTES = 504

Sections = Mapping[str, Mapping[str, str]]
"""Section to name to value."""

UNDESCRIBED: Final = "cannot be described"
"""The one fact of a section that could not be asked for: why, in place of all others."""

_MOST_LINES: Final = 8
_MOST_WORDS: Final = 256
_MOST_VARIANTS: Final = 4
"""How many ranks that hold different things tell what they hold: messages, and traffic, end."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Facts:
    """What ranks have to hold alike, in the words of the error where they do not.

    Attributes:
        held: by section and name; every rank has the same sections.
        head: the beginning of the message.
        advice: its end: what to do, or that by section, of which the first that differs counts.
        error: what is raised.
    """

    held: Sections
    head: str
    advice: str | Mapping[str, str]
    error: type[Exception] = CommMismatchError


def require_same(
    facts: Facts,
    group: GroupLike = None,
    *,
    peers: Sequence[int] = (),
    problem: BaseException | None = None,
) -> None:
    """Raise on every rank, naming ranks and values, unless all hold the same. A collective.

    One collective of a few bytes for each section; more only where something differs.

    Args:
        facts: what this rank holds.
        group: who compares; None: all processes.
        peers: the ranks that must hold the same, this one among them; empty: all of the group.
        problem: why this rank cannot go on, if so. It is told, and raised on all ranks: where
            something differs, that is why it is wrong on some of them only.

    Raises:
        Exception: `facts.error`, on every rank, also on those whose own peers agree; else `problem`
            on every rank: of `peers`, if there are any, as all of these have the same one.
    """
    said = {} if problem is None else {type(problem).__name__: str(problem)}
    facts = replace(facts, held={**facts.held, "problem": said})
    _compare(facts, gather_numbers(_row(facts, peers), group), group)
    if problem is not None:
        raise problem


def start_same(facts: Facts, group: GroupLike = None, *, told: int = 0) -> Callable[[], list[int]]:
    """Begin what `require_same` does; returns what waits for the others, and raises. A collective.

    Until that is called, once, nothing may be sent that only ranks which hold the same expect.
    Ranks need not agree on what they do meanwhile.

    Args:
        facts: what this rank holds.
        group: who compares; None: all processes.
        told: a number that ranks need not share. What is returned gives that of every rank.
    """
    started = gather_numbers([*_row(facts), told], group, async_op=True)

    def require() -> list[int]:
        rows = started.wait()
        _compare(facts, [row[:-1] for row in rows], group)
        return [row[-1] for row in rows]

    return require


def require_alike(facts: Facts, told: Sequence[Sections], group: GroupLike = None) -> None:
    """Raise what `require_same` does, of what was gathered on every rank. Nothing is sent.

    Args:
        facts: what this rank holds, and the words.
        told: what each rank reports, in the order of the group.
        group: who has told it; None: all processes.
    """
    # Written, as the order of names counts.
    if len(set(map(json.dumps, told))) > 1:
        ranks = as_group(group).ranks
        raise _error(facts, [([([r], held) for r, held in zip(ranks, told, strict=True)], [])])


def several_ranks(group: GroupLike = None) -> bool:
    """Return whether there is another rank to talk to; those of the `fake` backend do not exist.

    Args:
        group: its members; None: all processes, which are one where torch.distributed is not
            initialized.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return False
    found = as_group(group)
    return found.size > 1 and "fake" not in found.backends.values()


@overload
def gather_numbers(
    numbers: Sequence[int], group: GroupLike = None, *, async_op: Literal[False] = False
) -> list[tuple[int, ...]]: ...
@overload
def gather_numbers(
    numbers: Sequence[int], group: GroupLike = None, *, async_op: Literal[True]
) -> Pending[list[tuple[int, ...]]]: ...
def gather_numbers(
    numbers: Sequence[int], group: GroupLike = None, *, async_op: bool = False
) -> list[tuple[int, ...]] | Pending[list[tuple[int, ...]]]:
    """Return the numbers of every member, in the order of the group. A collective.

    Args:
        numbers: signed, of 64 bits, and equally many on every member.
        group: who is asked; None: all processes.
        async_op: return a handle at once, whose `wait()` gives the numbers. Members need not agree
            on it.

    Raises:
        CommError: a member did not come, or ended; see `explained_failures`.
    """
    if not several_ranks(group):
        return ready("gather_numbers", [tuple(numbers)], async_op)  # type: ignore[no-any-return]
    own = torch.tensor(numbers, dtype=torch.int64, device=message_device(group))
    if async_op:
        return Pending("gather_numbers", _StartedGather(own, as_group(group)), _rows)
    return _rows(_gathered(own, group))


def gather_texts(text: str, group: GroupLike = None) -> list[str]:
    """Return the text of every member, in the order of the group. A collective.

    One collective of 512 bytes; a second one where a text does not fit, compressed.
    """
    if not several_ranks(group):
        return [text]
    # Lists of collectives and the like have much the same words again and again.
    found = gather_bytes(zlib.compress(_encoded(text)) if text else b"", group)
    return [_decoded(zlib.decompress(one)) if one else "" for one in found]


def gather_bytes(content: bytes, group: GroupLike = None) -> list[bytes]:
    """Return the bytes of every member, in the order of the group. A collective.

    One collective of 512 bytes; a second one where somebody's do not fit.
    """
    if not several_ranks(group):
        return [content]
    # Every collective waits for the slowest member, so what is short goes along with the lengths.
    length = len(content).to_bytes(_LENGTH_BYTES, "little")
    begun = _gathered_bytes(length + content[:_FIRST_BYTES], _LENGTH_BYTES + _FIRST_BYTES, group)
    lengths = [int.from_bytes(one[:_LENGTH_BYTES], "little") for one in begun]
    # All members know all lengths, so all or none of them come to the second collective.
    left = max(lengths) - _FIRST_BYTES
    rest = [b"" for _ in begun]
    if left > 0:
        rest = _gathered_bytes(content[_FIRST_BYTES:], left, group)
    return [
        (one[_LENGTH_BYTES:] + more)[:size]
        for one, more, size in zip(begun, rest, lengths, strict=True)
    ]


def require_success(
    failure: BaseException | None,
    group: GroupLike = None,
    *,
    error: Callable[[str], BaseException] = CommError,
) -> None:
    """Raise on every rank where one of them has failed. A collective.

    What one rank alone may be unable to do is tried before it, and raised by it: the other ranks
    come here as well, and then raise, too.

    Args:
        failure: what this rank could not do, if anything.
        group: who tells; None: all processes.
        error: makes what is raised of words such as `rank 1: OSError: no such file`.

    Raises:
        BaseException: `failure` where there is one, and on all others `error`.
    """
    told = gather_texts("" if failure is None else f"{type(failure).__name__}: {failure}", group)
    if failure is not None:
        raise failure
    if any(told):
        failed = {r: said for r, said in zip(as_group(group).ranks, told, strict=True) if said}
        raise error(by_ranks(failed.values(), failed))


def broadcast_text(text: str, source: int, group: GroupLike = None) -> str:
    """Return the text of one member on every member; what the others pass is not looked at.

    Args:
        text: what this rank would say.
        source: the global rank that is heard.
        group: who hears; None: all processes.
    """
    if not several_ranks(group):
        return text
    device = message_device(group)
    packed = _encoded(text) if dist.get_rank() == source else b""
    length = torch.tensor([len(packed)], device=device)
    # Its length first: the others cannot know how much they have to receive.
    _broadcast(length, source, group)
    padded = bytearray(packed.ljust(int(length.item()), b"\0"))
    # No backend promises to send nothing; every member knows by now that there is nothing.
    if not padded:
        return ""
    sent = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    _broadcast(sent, source, group)
    return _decoded(bytes(sent.cpu().tolist()))


def digest(text: str) -> int:
    """Return 56 bits of a text: the same in every process, as `hash` is not.

    Not negative, and of less than 64 bits: it and its negative are int64, so that one reduction of
    both to their maximum tells whether all members have the same.
    """
    return int.from_bytes(blake2b(_encoded(text), digest_size=7).digest(), "little")


def by_ranks(said: Iterable[Hashable], ranks: Iterable[int]) -> str:
    """Write who says what: `rank 0: 4 rows; ranks 1-3: 8 rows`.

    Args:
        said: by every rank.
        ranks: in the same order.
    """
    holders = _holders(([rank], one) for rank, one in zip(ranks, said, strict=True))
    return "; ".join(f"{named(of_one)}: {one}" for one, of_one in holders.items())


def message_device(group: GroupLike = None) -> str:
    """Return the type of device that members send numbers from: the same on every member."""
    backends = as_group(group).backends
    # As "cpu:gloo,cuda:nccl": what is on the host then never waits for work on the device.
    return "cpu" if "cpu" in backends else next(iter(backends))


def _encoded(text: str) -> bytes:
    # Names of files that are no UTF-8 hold surrogates, and so do errors about them: one rank would
    # raise here while the others wait for it.
    return text.encode(errors="surrogatepass")


def _decoded(data: bytes) -> str:
    return data.decode(errors="surrogatepass")


def _gathered_bytes(own: bytes, size: int, group: GroupLike) -> list[bytes]:
    """So many bytes of every member; no pickle, which would run what another rank sends."""
    # Padded to one size: all_gather takes equal shapes of all members.
    padded = torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8)
    found = _gathered(padded.to(message_device(group)), group)
    return [one.numpy().tobytes() for one in found]


def _gathered(own: Tensor, group: GroupLike) -> list[Tensor]:
    """One tensor of the same shape from every member, on the CPU."""
    members = as_group(group)
    received = [torch.empty_like(own) for _ in members.ranks]
    with explained_failures("all_gather", own, members):
        dist.all_gather(received, own, group=members.process_group)
    return [one.cpu() for one in received]


class _StartedGather:
    """`_gathered` under way: what it sends and receives is held until it has finished."""

    def __init__(self, own: Tensor, members: Group) -> None:
        self._own, self._members = own, members
        self._received = [torch.empty_like(own) for _ in members.ranks]
        with explained_failures("all_gather", own, members, async_op=True):
            self._work: Any = dist.all_gather(
                self._received, own, group=members.process_group, async_op=True
            )

    def finish(self) -> list[Tensor]:
        """Wait, and return what `_gathered` does."""
        with failures_in_words("all_gather", self._own, self._members):
            self._work.wait()
        return [one.cpu() for one in self._received]


def _rows(gathered: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for row in gathered]


def _broadcast(x: Tensor, source: int, group: GroupLike) -> None:
    members = as_group(group)
    with explained_failures("broadcast", x, members):
        dist.broadcast(x, source, group=members.process_group)


def _row(facts: Facts, peers: Sequence[int] = ()) -> list[int]:
    """What a rank sends: of a fixed length, so that lists of different lengths are compared too."""
    return [digest(json.dumps(one)) for one in (list(peers), *map(dict, facts.held.values()))]


def _compare(facts: Facts, rows: Sequence[tuple[int, ...]], group: GroupLike) -> None:
    """Raise if peers have other rows: all members have the same, and decide alike. Collective."""
    if len(set(rows)) == 1:
        return
    # By set of peers, the ranks that hold the same.
    teams: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for rank, row in sorted(zip(as_group(group).ranks, rows, strict=True)):
        teams.setdefault(row[0], {}).setdefault(row, []).append(rank)
    mine = json.dumps({section: dict(one) for section, one in facts.held.items()})
    found = []
    for team in teams.values():
        # First what most ranks hold; of two that equally many hold, that of the lower rank.
        variants = sorted(team.values(), key=len, reverse=True)
        # The lowest rank of each speaks for the others, and everybody hears it.
        asked = variants[:_MOST_VARIANTS] if len(variants) > 1 else []
        told = [(ranks, json.loads(broadcast_text(mine, ranks[0], group))) for ranks in asked]
        found.append((told, sorted(chain(*variants[_MOST_VARIANTS:]))))
    if any(told for told, _ in found):
        raise _error(facts, found)


_Told = Sequence[tuple[list[int], Sections]]


def _error(facts: Facts, teams: Iterable[tuple[_Told, list[int]]]) -> Exception:
    """What differs among the ranks of each team that say something, and who was not asked."""
    lines = []
    for section in facts.held:
        for told, rest in teams:
            found = _differences(section, [(ranks, held[section]) for ranks, held in told])
            lines += [(section, line) for line in found]
            if found and rest:
                lines.append((section, f"{section}: {named(rest)} not told"))
    shown = [line for _, line in lines[:_MOST_LINES]]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more differences")
    advice = facts.advice
    if not isinstance(advice, str):
        advice = advice.get(lines[0][0], "Mend that, on all ranks alike.")
    return facts.error("\n  - ".join([facts.head, *shown]) + f"\n{advice}")


def _differences(section: str, told: Sequence[tuple[list[int], Mapping[str, str]]]) -> list[str]:
    """A line for each name whose value differs among ranks that say the same."""
    names = dict.fromkeys(name for _, values in told for name in values)
    lines = []
    # What cannot be described first: it is why all else of that rank is not there.
    for name in sorted(names, key=lambda name: name != UNDESCRIBED):
        held = _holders((ranks, values.get(name, "not there")) for ranks, values in told)
        if len(held) > 1:
            said = "; ".join(f"{_short(one)} on {named(ranks)}" for one, ranks in held.items())
            lines.append(f"{section} '{name}': {said}")
    orders = _holders((ranks, tuple(values)) for ranks, values in told)
    if not lines and len(orders) > 1:
        # Optimizers and buckets go by the order of parameters, so it is a difference as well.
        lines.append(f"{section}: another order on {named([*orders.values()][-1])}")
    return lines


def _short(text: str) -> str:
    """As much of a text as a message has room for."""
    # With the digest, as texts that differ behind their beginning would look equal.
    if len(text) <= _MOST_WORDS:
        return text
    return f"{text[:_MOST_WORDS]}… ({len(text)} characters, digest {digest(text):x})"


def _holders(told: Iterable[tuple[list[int], _T]]) -> dict[_T, list[int]]:
    """Who says each thing."""
    holders: dict[_T, list[int]] = {}
    for ranks, one in told:
        holders.setdefault(one, []).extend(ranks)
    return {one: sorted(of_one) for one, of_one in holders.items()}
