"""Watch which functions run during a recording, by `sys.setprofile`.

Of each function that runs for the first time, `StateReads` takes in the names before it does.
Inside of torch functions, which have no names that matter, nothing is watched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vescale_dtensor._autograd.function_results import HandsOn, waits_for_results
from vescale_dtensor._capture.code_files import USER, compares_ranks, kind_of_code
from vescale_dtensor._capture.custom_functions import CustomCall, Steps, is_apply, record
from vescale_dtensor._capture.garbage import hear_of_collections, is_collecting
from vescale_dtensor._capture.global_state import GlobalState, global_state
from vescale_dtensor._capture.library_calls import (
    guarded_by_call,
    guarded_by_code,
    imported_by,
    is_by_arguments,
    unsteady_call,
)
from vescale_dtensor._capture.live_calls import LiveCall, is_of_scaler, live_call, may_be_live
from vescale_dtensor._capture.places import Origin
from vescale_dtensor._capture.process_state import (
    guarded_by,
    is_import,
    is_noted,
    is_unsteady,
    moves_generator,
    numpy_draws,
    reads_any_attribute,
    starts_thread,
)
from vescale_dtensor._capture.reads import StateReads
from vescale_dtensor._capture.unsupported import refused, unsteady, user_line
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._torch.compat import no_torch_function


def can_watch() -> bool:
    """Whether this thread has no other profiler, which watching would displace."""
    return sys.getprofile() is None


class Watch(HandsOn):
    """Calls `StateReads.runs` before any function runs for the first time.

    Attributes:
        failure: the words of the first refusal.
        live: the call in progress that programs make again, see `live_calls`.
        finishes: whether torch finishes the call of a custom Function, whose forward has ended.
        printing: how many calls of `print` are in progress.
        ended: those that have ended, with the lines of code that made them and the modes in
            which they ran.
    """

    def __init__(self, reads: StateReads, unguarded: frozenset[str]) -> None:
        self._reads = reads
        self._unguarded = unguarded
        self.failure: str | None = None
        # The call that runs now and that programs make again; those that have ended since the
        # recorder took them.
        self.live: LiveCall | None = None
        self.ended: list[tuple[LiveCall, str, GlobalState]] = []
        self._frame: FrameType | None = None
        # The call in progress that is no part of the function.
        self._aside: FrameType | None = None
        self._stopped = False
        # The profile function that this one stands in the place of, if any.
        self._waiting: Any = None
        self._line = ""
        self.printing = 0
        # The recorder of the recording; the call of a custom Function that is in progress, the
        # frame of its forward, and what that returned.
        self.recorder: Steps | None = None
        self._custom: CustomCall | None = None
        self._forward: FrameType | None = None
        self._outputs: Any = None
        self.finishes = False
        # By id, with the scaler: whether its methods are live.
        self._scalers: dict[int, tuple[Any, bool]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch the block, in this thread."""
        # Of this thread only: ranks of a simulation are threads that record at the same time.
        draws = numpy_draws()
        try:
            hear_of_collections()
            sys.setprofile(self._event)
            yield
            if draws != numpy_draws():
                self._refuse("numpy.random", "random")
        finally:
            self.recorder = None  # which refers to this
            now = sys.getprofile()
            if now == self._event:
                sys.setprofile(self._waiting)
            elif not self._stopped:
                # Another one that is on stays on: it is the user's.
                self.failure = self.failure or str(_displaced())

    def pause(self) -> Any:
        """Watch nothing until `resume`, which takes what is returned."""
        # Not a context manager, which would cost a recording half a dozen Python calls each time.
        before = sys.getprofile()
        if before is None or waits_for_results(before):  # in a call inside of another one
            return before
        if before != self._event:
            raise _displaced()
        sys.setprofile(self._waiting)
        return before

    def resume(self, before: Any) -> None:
        """Watch again, if this was watching before `pause` and has not stopped since."""
        if before == self._event:
            now = sys.getprofile()
            self._waiting = now if waits_for_results(now) else None
            sys.setprofile(self._waiting if self._stopped else before)

    def stop(self) -> None:
        """Watch nothing from now on: a refusal has ended the recording."""
        self._stopped = True
        if sys.getprofile() == self._event:
            sys.setprofile(self._waiting)

    def wait(self, make: Callable[[], Any], frames: list[FrameType], shard: bool) -> None:
        """See `HandsOn`: results of custom Functions are waited for while this watches."""
        waiting = self._waiting or make()
        # First, without events: one that waits for nothing leaves at its first, and this method
        # returns.
        waiting.note(frames, shard)
        self._waiting = waiting

    def _hand_on(self, frame: FrameType, event: str, argument: Any) -> None:
        """Let whoever waits for the results of a custom Function see an event."""
        self._waiting(frame, event, argument)
        if sys.getprofile() is None:  # it has what it waited for
            self._waiting = None
            sys.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        """Called by Python at each call and return in this thread."""
        if self._waiting is not None:
            self._hand_on(frame, event, argument)
        if is_collecting():
            return
        if self._aside is not None:
            if event == "return" and frame is self._aside:
                self._aside = None
            return
        if self._custom is not None:
            self._note_custom(frame, event, argument)
        if self._frame is not None:
            # Nothing of it is watched: replays run it as it is, and it reads what it finds.
            if event == "return" and frame is self._frame:
                self._end_live()
            return
        # Comes before the first instruction of a function, so before it can write anything.
        # Resuming a generator is such an event, too.
        if event == "call":
            code = frame.f_code
            # A replay does not import again, and neither does eager mode: what a library reads
            # while it is imported for the first time is read once. And there may be much of it:
            # torch's compiler is imported by the first checkpoint of a process.
            if is_import(frame) and kind_of_code(code) != USER:
                self._aside = frame
                return
            if may_be_live(code) and self._begin_live(frame):
                return
            # Only the first time: what is met later is followed by all names so far.
            if not self._reads.has_run(code):
                # Which of it runs is chance: a rank that waits long asks whether others live.
                if compares_ranks(code):
                    self._aside = frame
                    return
                self._reads.runs(code, frame.f_globals)
                look = guarded_by_code(code)
                if look is not None:
                    self._reads.ask(look, Origin(None, f"{code.co_name}()", code.co_name))
                if reads_any_attribute(code):
                    self._reads.read_any_attribute()
            if is_by_arguments(code):
                self._hear_call(frame)
        elif event == "c_call" and is_noted(argument):
            self._hear(frame, argument)
        elif self.printing and event in ("c_return", "c_exception") and argument is print:
            self.printing -= 1

    def _hear_call(self, frame: FrameType) -> None:
        """Take in a call of a library's function whose arguments say which state it gives."""
        name = frame.f_code.co_name
        module, look = imported_by(frame), guarded_by_call(frame)
        if module is not None:
            self._reads.import_module(module)
        if look is not None:
            self._reads.ask(look, Origin(None, f"{name}()", name))
        unsteady = unsteady_call(frame)
        if unsteady is not None:
            self._refuse(unsteady, name)

    def _note_custom(self, frame: FrameType, event: str, argument: Any) -> None:
        """Follow the call of a custom Function: its forward begins, returns; it ends."""
        call, recorder = self._custom, self.recorder
        assert call is not None
        assert recorder is not None
        if event == "call" and call.arguments is None and call.is_forward(frame):
            self._forward = frame
            try:
                with no_torch_function():
                    call.begins(frame, recorder.trace)
            except CaptureError as error:  # kept, not raised: see `_hear`
                self.failure = self.failure or str(error)
        elif event == "return" and frame is self._forward:
            self._outputs, self.finishes = argument, True
        elif event in ("c_return", "c_exception") and call.is_of(frame, argument):
            outputs, self._custom, self._forward, self._outputs = self._outputs, None, None, None
            self.finishes = False
            if event == "c_return" and self.failure is None and recorder.failure is None:
                try:
                    with no_torch_function():  # the recorder is a mode, which need not see itself
                        record(call, outputs, recorder)
                except CaptureError as error:  # kept, not raised: see `_hear`
                    self.failure = str(error)

    def _hear(self, frame: FrameType, function: Any) -> None:
        """Take in that a function in C is called: it may give state, or what no guard has."""
        self.printing += function is print
        if self._custom is None and self.recorder is not None and is_apply(function):
            self._custom = CustomCall(frame, function, self.recorder)
        if reads_any_attribute(function):
            self._reads.read_any_attribute()
        look = guarded_by(function, frame)
        if look is not None:
            self._reads.ask(look, Origin(None, f"{function.__name__}()", function.__name__))
        # Kept, not raised: an exception in here would switch off the watching, and code of the
        # user's might catch it. `Recorder.finish` raises it.
        elif self.failure is None and moves_generator(function):
            self._fail(
                "a random generator was moved by something other than a torch function "
                "(manual_seed), which a replay would leave out. Do it outside"
            )
        elif self.failure is None and starts_thread(function, frame):
            self._fail(
                "a thread is started inside, whose reads and steps a recording does not see. Let "
                "it do its work outside"
            )
        elif self.failure is None and is_unsteady(function, frame):
            self._refuse(function.__qualname__, function.__name__)

    def _begin_live(self, frame: FrameType) -> bool:
        """Whether the call that begins is one that programs make again."""
        call = live_call(frame, self._reads.has_met)
        if is_of_scaler(frame.f_code):
            call = self._of_scaler(frame, call)
        if call is None:
            return False
        self.live, self._frame, self._line = call, frame, user_line()
        return True

    def _of_scaler(self, frame: FrameType, call: LiveCall | None) -> LiveCall | None:
        """The call of a scaler's method, if the scaler's calls before were live, too."""
        scaler = frame.f_locals["self"]
        names_optimizer = "optimizer" in frame.f_locals
        # `update` names no optimizer, so it does as the calls before it.
        before = self._scalers.get(id(scaler), (scaler, names_optimizer and call is not None))[1]
        if names_optimizer:
            self._scalers.setdefault(id(scaler), (scaler, before))
            if before != (call is not None) and self.failure is None:
                self._fail(
                    "a GradScaler steps optimizers of which some read values (a step count in "
                    "Python) and others do not. Make all of them fused, or call the scaler outside"
                )
        return call if before else None

    def _end_live(self) -> None:
        """End the live call."""
        assert self.live is not None
        # The modes of now, without asking the recorder, which is a mode itself.
        with no_torch_function():
            state = GlobalState(*global_state())
        self.ended.append((self.live, self._line, state))
        self.live = self._frame = None

    def _fail(self, words: str) -> None:
        """Note a refusal, with the line of the user's that runs."""
        self.failure = str(refused(words))

    def _refuse(self, title: str, name: str) -> None:
        """Note that code of the user's asked a clock, a generator or the outside world."""
        if self.failure is None and name not in self._unguarded:
            self._fail(unsteady(title, name))


def _displaced() -> CaptureError:
    """The error for a profiler that is switched on or off inside."""
    return refused(
        "a profiler is switched on or off inside (sys.setprofile, cProfile), without which a "
        "recording does not see what runs. Profile around the captured function"
    )
