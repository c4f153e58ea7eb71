"""The thread that looks whether this rank waits, asks the others why, and answers them."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from vescale_comm._torch.ranks import compact
from vescale_comm._watchdog.bounded_store import StoreLostError
from vescale_comm._watchdog.channel import Answer, Channel, Ending
from vescale_comm._watchdog.comparison import Comparison
from vescale_comm._watchdog.crash import CrashNote
from vescale_comm._watchdog.places import (
    Tracker,
    Wait,
    communicates,
    frame_of,
    main_thread,
    makes_a_group,
    site_of,
    wait_of,
)
from vescale_comm._watchdog.process_exit import end_process
from vescale_comm._watchdog.report import WorldState, report
from vescale_comm._watchdog.state_message import parsed_state, shortened, state_text

REPORT_AFTER = 30.0
"""Seconds without progress in one collective after which every rank says where it is."""

# Between two looks; a look at the stacks and at two counters of the store takes well below 1 ms.
_MOST_SECONDS = 5.0
# For a thread to end, and, at the end of a program without errors, for the other ranks.
_END_SECONDS = 2.0
# What an answer may take beyond the two looks that it needs, where the machine is busy.
_ANSWER_SECONDS = 1.0
# Between two looks at what others have said, at least; and how many ranks look in a second.
_PAUSE, _RANKS_PER_SECOND = 0.05, 2000
# Beyond so many at once the older ones are left to their deadlines.
_MOST_QUESTIONS = 64
# A failure longer ago than this is not why a program ends.
_RECENT_SECONDS = 60.0
_LOG = logging.getLogger("vescale_comm")


class Watcher:
    """Looks every few seconds; costs nothing in between.

    Args:
        channel: to the other ranks.
        server: the rank with whose process the store ends; None if it outlives them all.
        active: whether the world is there. Once it is destroyed the store may go at any time.
        comparison: of what the ranks execute; ends with the watcher.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        server: int | None,
        active: Callable[[], bool] = lambda: True,
        comparison: Comparison | None = None,
    ) -> None:
        self.report_after = REPORT_AFTER
        # After how many seconds a collective raises, if that was asked for.
        self.timeout: float | None = None
        self.comparison = comparison
        self._channel, self._server, self._active = channel, server, active
        self._note = CrashNote()
        self._stopped = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vescale-comm-watchdog", daemon=True)
        self._tracker = Tracker()
        self._stuck: dict[int, float] = {}
        self._asked_about: set[tuple[int, float]] = set()
        # The last one that was answered, and when.
        self._question, self._answered_at = 0, float("-inf")
        self._report_at: float | None = None
        self._ended, self._endings = 0, dict[int, Ending]()
        # What the main thread tried while it finds out why it failed.
        self._failed: Answer | None = None
        # How this rank ends if nothing else is known: its last failure, which it may have caught.
        self._failure: tuple[Ending, float] | None = None
        # Whether the store is gone for good, or about to go.
        self.gone = False

    @property
    def lost(self) -> bool:
        """Whether the store cannot be asked: it is gone, or does not answer at present."""
        return self.gone or self._channel.is_silent

    def _lose(self, error: RuntimeError) -> None:
        self.gone |= not isinstance(error, StoreLostError)

    @property
    def interval(self) -> float:
        """Seconds between two looks."""
        return min(_MOST_SECONDS, self.report_after / 4)

    def start(self) -> None:
        """Begin to look, in a thread of its own that does not keep the process alive."""
        self._note.open()
        self._channel.introduce(self._note.path)
        self._thread.start()

    def retire(self) -> None:
        """Stop, without a message to the others: the world has been destroyed."""
        self._finish()
        self.stop()
        self._note.close()

    def stop(self) -> None:
        """Look no more."""
        self._stopped = True
        self._woken.set()
        if self.comparison is not None:
            self.comparison.stop()

    def wake(self) -> None:
        """Look now, and after another interval from then on: `report_after` has changed."""
        self._woken.set()

    def _run(self) -> None:
        while True:
            self._woken.wait(self.interval)
            self._woken.clear()
            if self._stopped:
                return
            if not self._active():
                continue
            try:
                self.look(time.monotonic())
            except RuntimeError as error:
                self._lose(error)

    def look(self, now: float) -> None:
        """Do what is due.

        Args:
            now: time of `time.monotonic`.
        """
        since = self._tracker.update(now)
        if self.lost:
            self._end_hopeless_wait(now, since.get(main_thread(), now))
            return
        if self._server is not None:
            self._channel.learn()
        self._stuck = {t: at for t, at in since.items() if now - at >= self.report_after}
        if self._hear_endings():
            return
        self._end_hopeless_wait(now, since.get(main_thread(), now))
        self._answer(now)
        new = {(thread, at) for thread, at in self._stuck.items()} - self._asked_about
        if new:
            # Each wait is asked about once; one question serves all that wait at the same time.
            if self._report_at is None:
                self._channel.ask(self._question)
                self._answer(now)
            self._asked_about = {(thread, at) for thread, at in self._stuck.items()}
        if self._report_at is not None and now >= self._report_at:
            state = self._gathered(self._question, now)
            # Once more, for the rank that gathers; what that takes is not waited for here.
            if state is None and now < self._report_at + self.interval:
                return
            state = state or shortened(self._state(self._question))
            self._report_at = None
            self._say(state)

    def _end_hopeless_wait(self, now: float, since: float) -> None:
        """End this process if it waits for others to make a group, for longer than any collective.

        torch bounds that by half an hour, of which `bound_waits` knows nothing, and no exception
        reaches a thread that waits in C++.
        """
        frame = frame_of(main_thread())
        if self.timeout is None or now - since < self.timeout + self.interval or frame is None:
            return
        if not makes_a_group(frame):
            return
        wait = self.here()
        others = report(self._asked(ended=False), without=self._channel.rank)
        text = f"{wait.text}, timed out after {self.timeout:g} s"
        with suppress(RuntimeError):
            self._channel.end(Ending(text, True, False, wait.op, wait.ranks))
            if self._server == self._channel.rank:
                self._stay(2 * self.interval + 1)
        end_process(f"vescale_comm.CommTimeoutError: {text}:\n{others}")

    def explain(self, failed: Answer, *, ended: bool) -> tuple[str, WorldState]:
        """Find out why a collective failed on this rank; takes some looks of the others at most.

        Args:
            failed: the collective, and what became of it.
            ended: whether it failed because another rank ended; then who that was is enough.

        Returns:
            The report of the other ranks, and what it was made of. Empty if no rank answers.
        """
        self._failed = failed
        try:
            state = self._asked(ended=ended)
        except RuntimeError as error:
            self._lose(error)
            state = self._known()
        ending = Ending(failed.text, True, state.explains(), failed.op, failed.ranks)
        self._failure = ending, time.monotonic()
        self._failed = None
        return report(state, without=self._channel.rank), state

    def close(self, ending: Ending) -> None:
        """Say why this rank ends; as the server of the store wait until the others know."""
        if self.comparison is not None and ending.raised:
            self.comparison.look()
            self.comparison.give_up()
        else:
            self._finish()
        self.stop()
        self._note.close()
        # Before the interpreter ends: a daemon thread in C++ would be ended in the middle of it.
        self._thread.join(_END_SECONDS)
        if self.lost:
            return
        if self._failure is not None and not ending.raised:
            failed, at = self._failure
            ending = failed if time.monotonic() - at < _RECENT_SECONDS else ending
        try:
            self._channel.end(ending)
            if self._server == self._channel.rank:
                self._stay(2 * self.interval + 1 if ending.raised else _END_SECONDS)
        except RuntimeError as error:
            self._lose(error)

    def untold(self) -> str | None:
        """Return how the ranks have diverged, if no exception has said so."""
        found = self.comparison
        return None if found is None or found.was_raised else found.trouble

    def _finish(self) -> None:
        # A collective that failed has said what was wrong, and is in the logs of some ranks only.
        if self.comparison is None or self.lost:
            return
        if self._failure is None:
            self.comparison.finish(serves=self._server == self._channel.rank)
        else:
            self.comparison.give_up()

    def here(self) -> Answer:
        """Return where this rank is: the collective that it waits in, or a line of the program."""
        if self._failed is not None:
            return self._failed
        # A thread that has waited for long says more than the main thread that waits for it.
        thread = next(iter(self._stuck), main_thread())
        frame = frame_of(thread)
        if frame is None:
            return Answer("has no thread that runs")
        if not communicates(frame):
            return Answer(f"at {site_of(frame)}")
        wait = wait_of(frame)
        return Answer(wait_text(wait), wait.op, wait.ranks)

    def _answer(self, now: float) -> None:
        last = self._channel.asked()
        if last > self._question:
            here = self.here()
            # All of them: several ranks may have failed, and each one looks at its own question.
            for question in range(max(self._question, last - _MOST_QUESTIONS) + 1, last + 1):
                self._channel.answer(question, here)
            self._question, self._answered_at = last, now
            # By then every rank has looked at least once and has answered.
            self._report_at = now + 2 * self.interval

    def _hear_endings(self) -> bool:
        """Read who has failed; return whether the store is about to go."""
        ended = self._channel.ended()
        if ended <= self._ended:
            return False
        found = self._channel.raised()
        new = {rank: each for rank, each in found.items() if rank not in self._endings}
        last = None if self._server is None else self._channel.ending(self._server)
        if self._server is not None and last is not None:
            found[self._server] = last
            # It stays until all have said so. From then on the store may be gone at any time.
            self._channel.hear()
            self.gone = True
        # Only now: what a store that is silent has not told is asked for again.
        self._ended, self._endings = ended, found
        for rank, each in new.items():
            if each.raised and not each.consequence:
                _LOG.warning("rank %d: %s", rank, each.text)
        return self.gone

    def _say(self, state: WorldState) -> None:
        # A question about a failure is answered to who asked; no other rank waits.
        if any(each.waits for each in state.answers.values()):
            _LOG.warning(
                "a collective does not complete (rank %d of %d says):\n%s",
                self._channel.rank,
                self._channel.size,
                report(state),
            )

    def _asked(self, *, ended: bool) -> WorldState:
        """Ask all ranks, and wait until they have answered or cannot.

        Args:
            ended: whether it is enough to know which rank has ended.
        """
        if self.lost:
            return self._known()
        channel, now = self._channel, time.monotonic()
        deadline = now + 2 * self.interval + _ANSWER_SECONDS
        # A server has to answer all ranks that fail at once.
        pause = max(_PAUSE, channel.size / _RANKS_PER_SECOND)
        last = channel.asked()
        asked = last > self._question or now - self._answered_at < self.interval
        question = last if last and asked else channel.ask(last)
        if question > self._question:
            channel.answer(question, self.here())
        while ended and time.monotonic() < deadline:
            near = self._near()
            if near.explains():
                return replace(near, answered=False)
            time.sleep(pause)
        while (state := self._gathered(question, deadline)) is None:
            if time.monotonic() >= deadline + _ANSWER_SECONDS + pause:
                return shortened(self._state(question))
            time.sleep(pause)
        return state

    def _near(self) -> WorldState:
        """Return what needs no answer: who has failed, and whose process of this host is gone."""
        channel = self._channel
        endings = channel.endings() if channel.ended() else {}
        unknown = (rank for rank in range(channel.size) if rank not in endings)
        return WorldState(channel.size, {channel.rank: self.here()}, endings, channel.gone(unknown))

    def _gathered(self, question: int, deadline: float) -> WorldState | None:
        """Return what all answer to a question, which one rank gathers; None if it has not yet."""
        channel = self._channel
        if not channel.tells(question):
            found = parsed_state(channel.told(question))
            return None if found is None else self._with_own_host(found)
        while not (state := self._state(question)).complete() and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        channel.tell(question, state_text(state))
        return shortened(state)

    def _with_own_host(self, state: WorldState) -> WorldState:
        """Add whose process is gone: only ranks of its host know, and another one has gathered."""
        unknown = [rank for rank in range(state.size) if rank not in state.answers]
        return replace(state, gone={**state.gone, **self._channel.gone(unknown)})

    def _state(self, question: int) -> WorldState:
        channel = self._channel
        answers, endings = channel.answers(question), channel.endings()
        unknown = [rank for rank in range(channel.size) if rank not in answers]
        return WorldState(channel.size, answers, endings, channel.gone(unknown))

    def _stay(self, seconds: float) -> None:
        """Keep the store until all others know why this rank ends, or have ended as well."""
        deadline = time.monotonic() + seconds
        channel = self._channel
        while channel.heard() + channel.ended() < channel.size and time.monotonic() < deadline:
            time.sleep(0.02)

    def _known(self) -> WorldState:
        """Return what is known without the store."""
        endings = dict(self._endings)
        if self._server is not None and self._server not in endings:
            silent = "its process ended without a word, and with it the store: killed, or crashed"
            gone = self._channel.known_gone([self._server])
            endings[self._server] = Ending(gone.get(self._server, silent))
        return WorldState(self._channel.size, endings=endings, answered=False)


def wait_text(wait: Wait) -> str:
    """Write a wait as text, the same for all members that are in the same collective."""
    shape = f" of {wait.shape}" if wait.shape else ""
    group = f" over ranks {compact(wait.ranks)}" if wait.ranks else ""
    number = "" if wait.number is None else f", number {wait.number}"
    return f"waiting in {wait.op}{shape}{group}{number}, at {wait.site}"
