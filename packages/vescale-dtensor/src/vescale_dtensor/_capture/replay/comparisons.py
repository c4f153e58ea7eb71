"""Chooses the calls of a captured function that are compared, and says what is left out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from vescale_dtensor._capture.guard.call_key import KeyedCall
from vescale_dtensor._capture.record.regions import every_node
from vescale_dtensor._capture.replay.program import Program
from vescale_dtensor._capture.replay.replay_check import (
    Check,
    Comparison,
    ReplayCheck,
    agreed,
    keeps_casts,
    require_repeatable,
    why_once,
)
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._torch.compat import in_backward

NEVER = sys.maxsize
_UNKNOWN_RANKS = "no DTensor of its first call says which ranks have to agree on comparing it"

_KEPT_CASTS = "autocast keeps casts of parameters, which other calls of its region share"


def check_of(said: Check | ReplayCheck) -> ReplayCheck | None:
    """What a user has asked for.

    Raises:
        ValueError: it is none of the words.
    """
    if isinstance(said, ReplayCheck):
        return said
    if said is None or said is False:
        return None
    if said is True or said == "sampled":
        return ReplayCheck(every=said is True, required=True)
    raise ValueError(f"capture: check is True, 'sampled' or None, not {said!r}")


def why_left_out(unguarded: bool, transformed: bool) -> str | None:
    """Why a function is not compared unless that is asked for, in words."""
    if unguarded:
        return "replays may ignore what is `unguarded`, and the function does not"
    return "a `transform` may round otherwise" if transformed else None


class Comparisons:
    """The comparisons of one captured function.

    Args:
        check: which calls are compared; None: none.
        name: of the function.
        function: it.
        left_out: why none of its calls is compared unless that is asked for, in words.

    Attributes:
        following: the number of the next call that ranks vote on.
        count: how many calls were compared.
    """

    def __init__(
        self,
        check: ReplayCheck | None,
        name: str,
        function: Callable[..., Any],
        left_out: str | None,
    ) -> None:
        self._check, self._name, self._function = check, name, function
        self.left_out = None if check is None or check.required else left_out
        self.count = 0
        self._unsteady: str | None = None
        never = check is None or self.left_out is not None
        self.following = NEVER if never or check is None else check.next_after(1)

    def why_not(self, programs: Sequence[Program]) -> str | None:
        """Why calls, or a part of what they give, are not compared, in words; None if they are."""
        reasons = [self.left_out, *(one.uncompared for one in programs), self._unsteady]
        return next((one for one in reasons if one is not None), None)

    def is_due(self, calls: int, layouts: Sequence[Layout] | None) -> bool:
        """Whether ranks vote on the call of this number. All ranks count the same calls."""
        # Not on the first call, which is recorded or run. A call in backward is a recomputation of
        # one that was made before, and must do what that did.
        if self._check is None or layouts is None or in_backward():
            return False
        self.following = self._check.next_after(calls)
        return True

    def run(
        self, program: Program, call: KeyedCall, locals_: list[Tensor], layouts: Sequence[Layout]
    ) -> Any:
        """Replay a call on which ranks vote, and which has a program here. Collective.

        Raises:
            CaptureError: it differs from the function; or it can be done once only, where to
                compare it was asked for.
        """
        assert self._check is not None
        why = why_once(program, call)
        if not self._check.required:
            if not layouts and _communicates(program):
                why = _UNKNOWN_RANKS
            elif keeps_casts(program, call):
                why = _KEPT_CASTS
        program.uncompared = why
        # Ranks may differ in whether they have a program, and the function communicates.
        if not agreed(layouts, why is None or self._check.required):
            return program.replay(call.flat, locals_)
        if self._check.required:
            require_repeatable(why, layouts)
        self.count += 1
        return Comparison(
            self._name, self._function, program, call, layouts, self._check, self._is_unsteady
        ).run(locals_)

    def _is_unsteady(self, words: str) -> None:
        self._unsteady = words


def _communicates(program: Program) -> bool:
    return any([node.meta.get("records") for node in every_node(program.graph)])
