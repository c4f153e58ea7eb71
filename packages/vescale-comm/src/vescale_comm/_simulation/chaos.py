"""`chaos()`: inject delays, lost calls, flipped bits and deaths according to a plan."""

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_comm._engine.hooks import Proceed, with_hook
from vescale_comm._engine.primitives import Primitive
from vescale_comm._engine.waitable import Waitable
from vescale_comm._errors import CommArgumentError
from vescale_comm._simulation.group import SimulatedGroup
from vescale_comm._torch.buffers import flattened

Kind = Literal["delay", "drop", "corrupt", "die"]

EXIT_CODE = 77
"""Exit code of a process that a plan let die."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: `"delay"`: the rank comes late. `"drop"`: it does not come, but continues.
            `"corrupt"`: one bit of what it gets is flipped. `"die"`: its process ends with exit
            code 77; a simulated rank raises `Died`.
        rank: global rank that it happens to; None for every one.
        call: number of the call, counted from 0 on each rank since `chaos` was entered; None for
            every one. A collective that takes two movements counts twice.
        op: name of the collective; None for every one.
        probability: that it happens where the above hold.
        seconds: of a delay.
    """

    kind: Kind
    rank: int | None = None
    call: int | None = None
    op: str | None = None
    probability: float = 1.0
    seconds: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            known = ", ".join(get_args(Kind))
            raise CommArgumentError(f"Fault: unknown kind {self.kind!r}; there are {known}")


class Died(BaseException):
    """A simulated rank died of a plan. Not an Exception: a death is not caught by a handler."""


@contextmanager
def chaos(plan: Sequence[Fault], *, seed: int = 0) -> Iterator[list[str]]:
    """Let the collectives of this package go wrong as a plan says, while entered.

    What happens depends on the plan, the seed, the rank and the number of the call only: a run can
    be repeated. Yields a list that gets a line for each fault that happened on this rank.

    Args:
        plan: the faults; several may hit one call.
        seed: of their probabilities, and of the bits that are flipped.

    Examples:
        with chaos([Fault("delay", rank=1, probability=0.1)], seed=3): ...
    """
    trouble = _Trouble(tuple(plan), seed)
    with with_hook(trouble):
        yield trouble.happened


@dataclass(slots=True, eq=False)
class _Trouble:
    plan: tuple[Fault, ...]
    seed: int
    calls: int = 0
    happened: list[str] = field(default_factory=list)

    def __call__(self, primitive: Primitive, proceed: Proceed) -> Waitable | None:
        # Counted whether or not something happens: that makes a run with the same plan repeatable.
        rank, call = dist.get_rank(), self.calls
        self.calls += 1
        # A generator for each call: the draws of one fault cannot shift those of the next.
        dice = random.Random(f"{self.seed}/{rank}/{call}")
        corrupt = False
        for fault in self.plan:
            # The draw comes only where the fault applies, so adding another fault changes few
            # others.
            if not _hits(fault, primitive, rank, call) or dice.random() >= fault.probability:
                continue
            self.happened.append(f"{fault.kind} of {primitive.op} {call} on rank {rank}")
            if fault.kind == "drop":
                return None
            if fault.kind == "die":
                _die(primitive, self.happened[-1])
            elif fault.kind == "delay":
                time.sleep(fault.seconds)
            corrupt = corrupt or fault.kind == "corrupt"
        work = proceed()
        if not corrupt:
            return work
        if work is not None:
            return _CorruptedWork(work, primitive, dice)
        _flip(primitive.written(), dice)
        return None


def _hits(fault: Fault, primitive: Primitive, rank: int, call: int) -> bool:
    return (
        fault.rank in (None, rank)
        and fault.call in (None, call)
        and fault.op in (None, primitive.op)
    )


def _die(primitive: Primitive, message: str) -> None:
    if isinstance(cast(object, primitive.group.process_group), SimulatedGroup):
        raise Died(message)
    # No exit handlers and no farewell to the peers: that is what a crash looks like.
    os._exit(EXIT_CODE)


@dataclass(frozen=True, slots=True, eq=False)
class _CorruptedWork:
    work: Waitable
    primitive: Primitive
    dice: random.Random

    def wait(self) -> object:
        """Wait, and then flip a bit of what came."""
        result = self.work.wait()
        _flip(self.primitive.written(), self.dice)
        return result


def _flip(tensors: list[Tensor], dice: random.Random) -> None:
    filled = [x for x in tensors if x.numel()]
    if not filled:
        return
    with torch.no_grad():
        # As bytes: a flipped exponent bit is the fault that a sum check has to find.
        data = flattened(dice.choice(filled)).view(torch.uint8)
        data[dice.randrange(data.numel())] ^= 1 << dice.randrange(8)
