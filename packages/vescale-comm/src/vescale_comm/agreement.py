"""Gathers what each rank reports on every rank: all then go on, or all raise the same error.

    rows = gather_numbers([digest(settings)], group)
    if len(set(rows)) > 1:
        raise ValueError(f"the settings differ: {by_ranks(rows, as_group(group).ranks)}")

Every function that sends is a collective of the members of a group, and returns the same on each of
them. So whatever follows from the result alone is decided alike: no member waits for one that has
raised. These are checks beside a program: `trace` does not see them.
"""

import zlib
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_comm._engine.failures import explained_failures, failures_in_words
from vescale_comm._engine.handles import Pending, ready
from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._torch.ranks import named

__all__ = [
    "broadcast_text",
    "by_ranks",
    "digest",
    "gather_bytes",
    "gather_failures",
    "gather_numbers",
    "gather_texts",
    "message_device",
    "named",
    "several_ranks",
]

# Of a text: its length, and what of it goes along.
_LENGTH_BYTES = 8
_FIRST_BYTES = 504


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


def gather_failures(failure: BaseException | None, group: GroupLike = None) -> dict[int, str]:
    """Return by global rank what failed there, `"OSError: no such file"`. A collective.

    What one rank alone may be unable to do is tried before it, and raised after it: the other
    ranks come here as well, and then raise, too.

    Returns:
        Words of the ranks that failed, in the order of the group; nothing where none did.
    """
    words = "" if failure is None else f"{type(failure).__name__}: {failure}"
    told = gather_texts(words, group)
    alone = not several_ranks(group)
    ranks = _own_rank() if alone else as_group(group).ranks
    return {rank: said for rank, said in zip(ranks, told, strict=True) if said}


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
    holders: dict[Hashable, list[int]] = {}
    for rank, one in zip(ranks, said, strict=True):
        holders.setdefault(one, []).append(rank)
    return "; ".join(f"{named(sorted(of_one))}: {one}" for one, of_one in holders.items())


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


def _own_rank() -> tuple[int, ...]:
    started = dist.is_available() and dist.is_initialized()
    return (dist.get_rank() if started else 0,)
