"""`explain`: records every op, its layouts, what it redistributed, the bytes sent, and why.

`_Explainer` observes calls and keeps a stack of open ones per thread, as ops call other ops. Bytes
come from `vescale_comm.trace`; those of inner calls, which have records of their own, are
subtracted from the outer ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import local as thread_local
from typing import Any

import torch
from torch import Tensor
from vescale_comm import Trace, trace
from vescale_comm.nested import tensors_within

from vescale_dtensor._dispatch.observers import CallObserver
from vescale_dtensor._inspect.op_support import public_name
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.mesh import axis_names, describe
from vescale_dtensor._layout.notation import short, short_dtype
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import OpPlan
from vescale_dtensor._redistribute.plan import RedistributionPlan
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.observers import observing

_WIDEST_CELL = 56


@dataclass(frozen=True)
class TensorNote:
    """Description of an operand or result of an op; its `str` is the short form.

    Attributes:
        shape, dtype: global.
        placements: one per mesh axis; None for a plain tensor.
        layout: of a DTensor; None for a plain tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...] | None
    layout: Layout | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        if self.layout is not None:
            return short(self.shape, self.dtype, self.layout)
        extents = ", ".join(map(str, self.shape))
        return f"plain {short_dtype(self.dtype)}[{extents}]"


@dataclass(frozen=True)
class Move:
    """One redistribution.

    Attributes:
        source, target: placements before and after.
        bytes: what this rank sent for it.
        plan: its steps; its `str` is a table.
    """

    source: tuple[Placement, ...]
    target: tuple[Placement, ...]
    bytes: int
    plan: RedistributionPlan = field(repr=False, compare=False)

    def __str__(self) -> str:
        return changes(self.plan)


def changes(plan: RedistributionPlan) -> str:
    """The placements that a redistribution changes, in words: `dp: Shard(0) → Replicate()`."""
    source, target = plan.source, plan.target
    if source.mesh is not target.mesh and source.mesh != target.mesh:
        before, after = (f"{list(x.placements)} on {describe(x.mesh)}" for x in (source, target))
        return f"{before} → {after}"
    rows = zip(axis_names(source.mesh), source.placements, target.placements, strict=True)
    return ", ".join(f"{name}: {old} → {new}" for name, old, new in rows if old != new)


@dataclass(frozen=True)
class CallRecord:
    """One op, or one redistribution outside of any op.

    Attributes:
        op: name of the torch function; `redistribute` if the program asked for it; `(gradient)` if
            it was part of a backward; `(other)` for all remaining collectives together, as the
            reductions of parameters' gradients, and broadcasts.
        inputs, outputs: its tensors.
        by: what decided how it ran: `rule NAME`, `fallback` (no rule, so operands were
            replicated), or empty.
        moves: redistributions of operands.
        bytes: what this rank sent for it, in collectives inside of the op too.
    """

    op: str
    inputs: tuple[TensorNote, ...]
    outputs: tuple[TensorNote, ...]
    by: str
    moves: tuple[Move, ...]
    bytes: int


@dataclass
class Explanation:
    """What was recorded inside of `explain()`. Its `str` is a table.

    Attributes:
        records: one for each op, in the order in which they ended.
    """

    records: list[CallRecord] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent, for all records."""
        return sum(record.bytes for record in self.records)

    @property
    def fallbacks(self) -> list[CallRecord]:
        """The records of ops without a rule, whose operands were replicated."""
        return [record for record in self.records if record.by == "fallback"]

    def __str__(self) -> str:
        head = ("op", "in", "out", "by", "moved", "bytes sent")
        rows = [head, *(_row(record) for record in self.records)]
        total = f"{len(self.records)} ops, {self.bytes:,} bytes sent by this rank"
        return "\n".join([*_aligned(rows), total])


def _row(record: CallRecord) -> tuple[str, ...]:
    return (
        record.op,
        _joined(record.inputs),
        _joined(record.outputs),
        record.by,
        _joined(record.moves, "; "),
        f"{record.bytes:,}" if record.bytes else "",
    )


def _joined(items: Sequence[object], separator: str = ", ") -> str:
    """Items in one cell of the table, shortened if they are too wide."""
    text = separator.join(map(str, items))
    return text if len(text) <= _WIDEST_CELL else f"{text[: _WIDEST_CELL - 1]}…"


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """The lines of a table: numbers in the last column to the right, a rule below the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for index, row in enumerate(rows):
        *cells, last = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join([*cells, row[-1].rjust(len(last))]).rstrip()
        if index == 0:
            yield "  ".join("─" * width for width in widths)


@dataclass
class _OpenCall:
    """A call that has not returned yet.

    Attributes:
        func: the torch function.
        inputs: its tensors.
        began: number of collectives traced before it.
        by: what decided how it ran; see `CallRecord`.
        moves: redistributions of its operands.
        inner: bytes sent by calls inside of it, and by redistributions with records of their own.
        nested: whether there were calls inside of it.
    """

    func: Callable[..., Any]
    inputs: tuple[TensorNote, ...]
    began: int
    by: str = ""
    moves: list[Move] = field(default_factory=list)
    inner: int = 0
    nested: bool = False


class _Explainer(CallObserver):
    """The observer that makes an `Explanation`."""

    def __init__(self, collectives: Trace) -> None:
        self.explanation = Explanation()
        self._collectives = collectives
        # Observers see the calls of all threads; calls nest within one thread only.
        self._frames = thread_local()

    def _stack(self) -> list[_OpenCall]:
        if not hasattr(self._frames, "stack"):
            self._frames.stack = []
        stack: list[_OpenCall] = self._frames.stack
        return stack

    def on_call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        notes = tuple(map(_note, tensors_within((args, kwargs))))
        self._stack().append(_OpenCall(func, notes, len(self._collectives.records)))

    def on_return(self, result: Any) -> None:
        stack = self._stack()
        if not stack:
            return  # the call began before `explain` was entered
        frame = stack.pop()
        sent = sum(record.bytes for record in self._collectives.records[frame.began :])
        own = sent - frame.inner  # inner calls have records of their own
        outputs = tuple(map(_note, tensors_within(result)))
        if _is_op(frame, outputs, own):
            name = _name(frame.func)
            record = CallRecord(name, frame.inputs, outputs, frame.by, tuple(frame.moves), own)
            self.explanation.records.append(record)
        if stack:
            stack[-1].inner += sent
            stack[-1].nested = True

    def on_plan(self, call: OpCall, plan: OpPlan) -> None:
        self._decided(f"rule {plan.rule.name}")

    def on_fallback(self, call: OpCall) -> None:
        self._decided("fallback")

    def _decided(self, by: str) -> None:
        stack = self._stack()
        if stack:
            stack[-1].by = by

    def on_redistribute(self, plan: RedistributionPlan, backward: bool) -> None:
        move = Move(plan.source.placements, plan.target.placements, plan.wire_bytes, plan)
        stack = self._stack()
        # Of an operand of the open call; else a record of its own, whose bytes the open call must
        # not count again.
        if stack and not backward and stack[-1].func not in _RUN_PROGRAMS:
            stack[-1].moves.append(move)
            return
        if stack:
            stack[-1].inner += plan.wire_bytes
        op = "(gradient)" if backward else "redistribute"
        self.explanation.records.append(CallRecord(op, (), (), "", (move,), move.bytes))


# Calls that run parts of the user's program inside of them: hooks, recomputed activations.
_RUN_PROGRAMS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def _is_op(frame: _OpenCall, outputs: tuple[TensorNote, ...], sent: int) -> bool:
    """Whether a call is worth a record: not if it only reads metadata, or only calls other ops."""
    if frame.by or frame.moves or sent > 0:
        return True
    return bool(outputs) and not frame.nested


def _name(func: Callable[..., Any]) -> str:
    """The short name of a torch function: `linear`, `Tensor.add`."""
    return public_name(func).removeprefix("torch.nn.functional.").removeprefix("torch.")


def _note(tensor: Tensor) -> TensorNote:
    # Not the tensor itself: an explanation would keep it alive.
    if not isinstance(tensor, DTensor):
        return TensorNote(tuple(tensor.shape), tensor.dtype, None)
    spec = tensor._spec
    layout = spec.layout
    return TensorNote(tuple(spec.shape), spec.tensor_meta.dtype, layout.placements, layout)


@contextmanager
def explain() -> Iterator[Explanation]:
    """Record every op on DTensors: layouts in and out, what was redistributed, bytes, and why.

    It does not communicate, and it nests. It records all threads of the process. Of backward it
    records redistributions only, since backward runs on local tensors. Inside of the block ops take
    the slow path; outside it costs nothing.

    Example::

        with vescale_dtensor.explain() as report:
            loss = model(batch)
        print(report)
        assert not report.fallbacks
    """
    with trace() as collectives:
        watcher = _Explainer(collectives)
        with observing(watcher):
            yield watcher.explanation
    # Collectives outside of calls and redistributions, which no observer sees. The records of
    # redistributions state planned bytes, so the difference might be negative.
    explanation = watcher.explanation
    rest = collectives.bytes() - explanation.bytes
    if rest > 0:
        explanation.records.append(CallRecord("(other)", (), (), "", (), rest))
