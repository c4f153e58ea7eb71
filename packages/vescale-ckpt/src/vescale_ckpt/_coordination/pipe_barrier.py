"""Lets ranks of one machine fill and empty memory together, and tell each other through pipes.

A collective over a network takes a millisecond, and a pipe some microseconds: reading together is
many short rounds.
"""

import os
import select
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from vescale_ckpt._errors import CoordinationError

# A word: which rank, how many rounds it has filled, and how many it has read. Shorter than what a
# pipe writes atomically, so words of several ranks do not mix.
_WORD = struct.Struct("<qqq")
_STOP = -1
# A rank that reads from a network file system may stand still for long.
PATIENCE_SECONDS = 300.0


class PipeBarrier:
    """This rank's end of a pipe, and the ends of its neighbours that it writes to."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        # Only this process holds the end to read from. When it dies, the kernel closes it, and
        # polling the other end reports an error: that is how the others notice.
        self._read, self._write = os.pipe()
        self.name = f"/proc/{os.getpid()}/fd/{self._write}"
        self._others: dict[int, int] = {}
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)
        # Rounds that each of the others has filled and read, as far as this rank knows.
        self.filled: dict[int, int] = {}
        self.taken: dict[int, int] = {}

    def attach(self, names: dict[int, str]) -> None:
        """Open the pipes of the other ranks; `OSError` if one is out of reach."""
        for rank, name in names.items():
            if rank != self.rank:
                descriptor = os.open(name, os.O_WRONLY | os.O_CLOEXEC)
                self._others[rank] = descriptor
                # No events: only reports that there is no reader any more.
                self._poll.register(descriptor, 0)

    def meet(self) -> bool:
        """Wait until all ranks have attached. False, on all of them, if one could not and left."""
        # Said only by a rank that has attached: heard from all, all have.
        self.tell(0, 0)
        while late := sorted(set(self._others) - set(self.filled)):
            # Gone before it said so: it could not attach. Leaving in turn tells those that wait for
            # this one.
            if set(late) & set(self._hear(late)):
                self.leave()
                return False
        return True

    def leave(self) -> None:
        """Leave: this rank reads no more, which is how the others notice."""
        os.close(self._read)
        self._read = -1

    @property
    def stopped(self) -> bool:
        """Whether another rank is known to go no further."""
        return _STOP in self.filled.values()

    def tell(self, filled: int, taken: int) -> None:
        """Tell the others how far this rank is."""
        for descriptor in self._others.values():
            # A rank that is gone has died, which `listen` finds, or has finished and needs no word.
            with suppress(BrokenPipeError):
                os.write(descriptor, _WORD.pack(self.rank, filled, taken))

    def stop(self) -> None:
        """Tell the others that this rank goes no further, so that none waits for it."""
        self.tell(_STOP, _STOP)

    def listen(self, waited_for: list[int]) -> None:
        """Wait until one of the others tells how far it is.

        Raises:
            CoordinationError: One that is waited for has died, or none moves for too long.
        """
        # A rank that has finished closes its pipe, too: only one that is still waited for has died.
        gone = self._hear(waited_for)
        if set(gone) & set(waited_for):
            raise CoordinationError(f"rank(s) {gone} died while reading what ranks share")

    def _hear(self, waited_for: list[int]) -> list[int]:
        """Read the others' reports, or return those of them that are gone."""
        began = time.monotonic()
        ready = dict(self._poll.poll(PATIENCE_SECONDS * 1000))
        if self._read in ready:
            # Words are written atomically, so the pipe has complete ones.
            words = os.read(self._read, 64 * _WORD.size)
            for rank, filled, taken in _WORD.iter_unpack(words):
                self.filled[rank], self.taken[rank] = filled, taken
            return []
        gone = [rank for rank, descriptor in self._others.items() if descriptor in ready]
        if not gone:
            raise CoordinationError(
                f"rank(s) {waited_for} did not move for {time.monotonic() - began:.0f} s while "
                "reading what ranks share"
            )
        for rank in gone:
            # Polling would report it again at once, for ever.
            self._poll.unregister(self._others[rank])
        return gone

    def close(self) -> None:
        """Close all pipes."""
        for descriptor in (self._read, self._write, *self._others.values()):
            if descriptor >= 0:
                os.close(descriptor)


def in_rounds(
    barrier: PipeBarrier,
    rounds: int,
    slots: int,
    fill: Callable[[int], object],
    take: Callable[[int], object],
) -> bool:
    """Fill this rank's part of every round, and read the round once all ranks have filled theirs.

    As many rounds as there are `slots` are under way at a time: round n is filled when all have
    read round n - slots. So a rank that is late delays the others only `slots` rounds later.
    False if another rank has stopped.
    """
    filled = taken = 0
    while taken < rounds:
        late_to_fill = [rank for rank, count in barrier.filled.items() if count <= taken]
        late_to_take = [rank for rank, count in barrier.taken.items() if count <= filled - slots]
        if barrier.stopped:
            return False
        # Taking first: it lets the others fill the slot again.
        if filled > taken and not late_to_fill:
            take(taken)
            taken += 1
        elif filled < min(rounds, taken + slots) and not late_to_take:
            fill(filled)
            filled += 1
        else:
            barrier.listen(sorted({*late_to_fill, *late_to_take}))
            continue
        # After each step, and only of steps that are complete: others read this slot, or fill it,
        # by this word.
        barrier.tell(filled, taken)
    return True
