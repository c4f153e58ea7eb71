"""Ranks of one machine in step with each other, through pipes.

A collective over a network takes a millisecond, and a pipe some microseconds: reading together is
many short steps.
"""

import os
import select
import struct
import time
from contextlib import suppress

from vescale_ckpt._errors import CoordinationError

# Which rank, and which step it has done. Shorter than what a pipe takes in one piece.
_WORD = struct.Struct("<qq")
_STOP = -1
# A rank that reads from a network file system may stand still for long.
PATIENCE_SECONDS = 300.0


class Steps:
    """This rank's end of a pipe, and the ends of its neighbours that it writes to."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        # Only this process holds the end to read from: when it is gone, the others are told.
        self._read, self._write = os.pipe()
        self.name = f"/proc/{os.getpid()}/fd/{self._write}"
        self._others: dict[int, int] = {}
        self._done: dict[int, int] = {}

    def attach(self, names: dict[int, str]) -> None:
        """Open the pipes of the other ranks; `OSError` if one is out of reach."""
        for rank, name in names.items():
            if rank != self.rank:
                self._others[rank] = os.open(name, os.O_WRONLY | os.O_CLOEXEC)
                self._done[rank] = 0

    def done(self, step: int) -> bool:
        """Say that this rank has done `step` (they count from 1), and wait until all have.

        False if one of them has stopped.

        Raises:
            CoordinationError: One has died, or has not moved for too long.
        """
        self._tell(step)
        while any(0 <= reached < step for reached in self._done.values()):
            if _STOP in self._done.values():
                return False
            self._listen(step)
        return _STOP not in self._done.values()

    def stop(self) -> None:
        """Say that this rank goes no further, so that nobody waits for it."""
        self._tell(_STOP)

    def close(self) -> None:
        """Let go of all pipes."""
        for descriptor in (self._read, self._write, *self._others.values()):
            os.close(descriptor)

    def _tell(self, step: int) -> None:
        for descriptor in self._others.values():
            # One that is gone has died, which `_listen` finds, or needs no word any more.
            with suppress(BrokenPipeError):
                os.write(descriptor, _WORD.pack(self.rank, step))

    def _listen(self, step: int) -> None:
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        waited_for = {rank: self._others[rank] for rank, at in self._done.items() if at < step}
        for descriptor in waited_for.values():
            poll.register(descriptor, 0)  # tells only that nobody reads there any more
        began = time.monotonic()
        ready = dict(poll.poll(PATIENCE_SECONDS * 1000))
        if self._read in ready:
            rank, reached = _WORD.unpack(os.read(self._read, _WORD.size))
            self._done[rank] = reached
            return
        gone = [rank for rank, descriptor in waited_for.items() if descriptor in ready]
        if gone:
            raise CoordinationError(f"rank(s) {gone} died while reading what ranks share")
        waited = time.monotonic() - began
        raise CoordinationError(
            f"rank(s) {list(waited_for)} did not move for {waited:.0f} s while reading what ranks "
            "share"
        )
