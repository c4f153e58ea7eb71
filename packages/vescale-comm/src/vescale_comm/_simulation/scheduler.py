"""Rank threads that run one at a time and switch only where they wait for each other."""

import threading
from collections.abc import Callable
from contextvars import copy_context

import torch

from vescale_comm._errors import CommError, DeadlockError
from vescale_comm._simulation.state import ProcessState
from vescale_comm._torch.call_site import call_site

MOST_POLLS = 100_000
"""After so many looks at what cannot come while all others wait, a rank is taken to do no more."""


class Rank:
    """One rank: its thread, and what it waits for."""

    def __init__(self, index: int) -> None:
        self.index = index
        # Closed at first: a thread runs only after another has released its gate, so that one runs
        # at a time although all are started.
        self.gate = threading.Semaphore(0)
        self.thread: threading.Thread | None = None
        # Every rank starts with the caller's generators, hooks and environment.
        self.state = ProcessState.captured()
        self.done = False
        self.failure: BaseException | None = None
        self.ready: Callable[[], bool] | None = None
        self.where = ""
        self.interrupt: BaseException | None = None
        self.polls = 0

    def runnable(self) -> bool:
        """Return whether it could go on."""
        if self.done:
            return False
        return self.ready is None or self.interrupt is not None or self.ready()

    def described(self) -> str:
        """Say what it does, for the report of a deadlock."""
        if self.failure is not None:
            return f"rank {self.index} raised {type(self.failure).__name__}: {self.failure}"
        return f"rank {self.index} {'has returned' if self.done else 'waits in ' + self.where}"


class Scheduler:
    """Runs `world_size` ranks in turns."""

    def __init__(self, world_size: int) -> None:
        self.ranks = [Rank(index) for index in range(world_size)]
        self._running = self.ranks[0]
        # Whether all ranks have waited at once.
        self.was_stuck = False
        self._finished = threading.Event()

    @property
    def current(self) -> int:
        """The rank that runs now."""
        return self._running.index

    def run(self, body: Callable[[int], None]) -> None:
        """Run `body(rank)` for all ranks; return when all have returned."""
        threads = torch.get_num_threads()
        for rank in self.ranks:
            # A copy for each rank: what one rank sets in a context variable the others do not see.
            context = copy_context()
            rank.thread = threading.Thread(
                target=context.run,
                args=(self._main, rank, body, threads),
                name=f"simulated-rank-{rank.index}",
                daemon=True,
            )
            rank.thread.start()
        self._running.gate.release()
        try:
            self._finished.wait()
        except BaseException:  # an interrupt of the caller ends the ranks where they next wait
            for rank in self.ranks:
                rank.interrupt = CommError("the simulation was interrupted")
            raise
        for rank in self.ranks:
            assert rank.thread is not None
            rank.thread.join()

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until `ready()`; called by the running rank.

        Raises:
            DeadlockError: it never will be: every rank waits.
        """
        me = self._mine(what)
        me.polls = 0
        while not ready():
            me.ready, me.where = ready, f"{what} at {call_site()}"
            self._leave(me)
        me.ready = None

    def pause(self, what: str) -> None:
        """Let another rank run, if one can; called by a rank that polls.

        Raises:
            DeadlockError: none could, for so many turns that the rank does nothing but poll.
        """
        me = self._mine(what)
        me.where = f"{what} at {call_site()}"
        me.polls = 0 if self._others_can_run(me) else me.polls + 1
        if me.polls > MOST_POLLS:
            raise DeadlockError(self._report())
        self._leave(me)

    def interrupt_others(self, kind: type[BaseException], words: str) -> None:
        """Raise an error in all other ranks that wait now, each in its turn."""
        for rank in self.ranks:
            if rank is not self._running and rank.ready is not None and not rank.done:
                rank.interrupt = kind(words)

    def _others_can_run(self, me: Rank) -> bool:
        return any(rank.runnable() for rank in self.ranks if rank is not me)

    def _report(self) -> str:
        lines = [rank.described() for rank in self.ranks]
        return "deadlock, nobody can go on:\n  " + "\n  ".join(lines)

    def _mine(self, what: str) -> Rank:
        # Autograd's threads, for example: switching from one would leave the rank's own thread
        # running.
        if threading.current_thread() is not self._running.thread:
            raise CommError(
                f"{what} was called from a thread of its own; in a simulation each rank "
                "communicates from the thread that runs it"
            )
        return self._running

    def _main(self, me: Rank, body: Callable[[int], None], threads: int) -> None:
        me.gate.acquire()
        me.state.restore()
        torch.set_num_threads(threads)  # a setting of each thread
        try:
            # Backward as well, in this thread: nodes of an accelerator have threads of autograd's
            # own, which may not switch ranks, and one for all ranks. Of each thread, as above.
            with torch.autograd.set_multithreading_enabled(False):
                body(me.index)
        except BaseException as error:
            me.failure = error
        me.done = True
        # Chosen while this thread still holds the turn: two threads never look at the ranks at
        # once.
        following = self._following(me)
        if following is None:
            self._finished.set()
        else:
            self._switch(following)

    def _leave(self, me: Rank) -> None:
        following = self._following(me)
        if following is not me:
            assert following is not None
            # Only where the rank really changes: capturing the generators is what a switch costs.
            me.state = ProcessState.captured()
            self._switch(following)
            me.gate.acquire()
            me.state.restore()
        interrupt, me.interrupt = me.interrupt, None
        if interrupt is not None:
            me.ready = None
            raise interrupt

    def _following(self, me: Rank) -> Rank | None:
        """Return the next rank that can run; None when all are done."""
        # Round robin from the next one: no rank starves while others poll.
        others = [*self.ranks[me.index + 1 :], *self.ranks[: me.index + 1]]
        for rank in others:
            if rank.runnable():
                return rank
        waiting = [rank for rank in others if not rank.done]
        if not waiting:
            return None
        self.was_stuck = True
        for rank in waiting:
            # Every waiting rank raises, in its own turn, so that each one shows its own stack.
            rank.interrupt = DeadlockError(self._report())
        return waiting[0]

    def _switch(self, following: Rank) -> None:
        # Before the gate opens: the thread that wakes up looks at it at once.
        self._running = following
        following.gate.release()
