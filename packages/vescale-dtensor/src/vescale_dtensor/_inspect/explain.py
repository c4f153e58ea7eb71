"""`explain`: what every op did, in which layouts, what it moved, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import local as thread_local
from typing import Any

import torch
from torch import Tensor
from vescale_comm import Trace, trace

from vescale_dtensor._dispatch.observers import CallObserver
from vescale_dtensor._inspect.op_support import public_name
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.mesh import axis_names, describe
from vescale_dtensor._layout.notation import short, short_dtype
from vescale_dtensor._layout.placements import Placement
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import OpPlan
from vescale_dtensor._redistribute.plan import RedistributionPlan
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.observers import observing
from vescale_dtensor._torch.pytree import tensors_within

_WIDEST_CELL = 56


@dataclass(frozen=True)
class TensorNote:
    """A tensor that went into an op or came out of it; `str` is its short form.

    Attributes:
        shape, dtype: global.
        placements: one per mesh axis; None for a plain tensor.
        layout: of a DTensor.
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
        plan: its steps; `str` of it is a table.
    """

    source: tuple[Placement, ...]
    target: tuple[Placement, ...]
    bytes: int
    plan: RedistributionPlan = field(repr=False, compare=False)

    def __str__(self) -> str:
        return changes(self.plan)


def changes(plan: RedistributionPlan) -> str:
    """What a redistribution changes, in words: `dp: Shard(0) → Replicate()`."""
    source, target = plan.source, plan.target
    if source.mesh is not target.mesh and source.mesh != target.mesh:
        before, after = (f"{list(x.placements)} on {describe(x.mesh)}" for x in (source, target))
        return f"{before} → {after}"
    rows = zip(axis_names(source.mesh), source.placements, target.placements, strict=True)
    return ", ".join(f"{name}: {old} → {new}" for name, old, new in rows if old != new)


@dataclass(frozen=True)
class Record:
    """One op, or one redistribution that no op asked for.

    Attributes:
        op: name of the torch function; `redistribute` where it was asked for by the program,
            `(gradient)` where a backward did it, `(other)` for all further collectives together:
            the sums of parameters' gradients, broadcasts.
        inputs, outputs: the tensors.
        by: what decided: `rule NAME`, `fallback` (no rule: operands replicated), or empty.
        moves: redistributions of operands.
        bytes: all that this rank sent for it, collectives inside of the op too.
    """

    op: str
    inputs: tuple[TensorNote, ...]
    outputs: tuple[TensorNote, ...]
    by: str
    moves: tuple[Move, ...]
    bytes: int


@dataclass
class Explanation:
    """What was seen while `explain()` was open. `str` of it is a table.

    Attributes:
        records: one for each op, in the order in which they ended.
    """

    records: list[Record] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent."""
        return sum(record.bytes for record in self.records)

    @property
    def fallbacks(self) -> list[Record]:
        """The ops that had no rule, so that their operands were replicated."""
        return [record for record in self.records if record.by == "fallback"]

    def __str__(self) -> str:
        head = ("op", "in", "out", "by", "moved", "bytes sent")
        rows = [head, *(_row(record) for record in self.records)]
        total = f"{len(self.records)} ops, {self.bytes:,} bytes sent by this rank"
        return "\n".join([*_aligned(rows), total])


def _row(record: Record) -> tuple[str, ...]:
    return (
        record.op,
        _joined(record.inputs),
        _joined(record.outputs),
        record.by,
        _joined(record.moves, "; "),
        f"{record.bytes:,}" if record.bytes else "",
    )


def _joined(items: Sequence[object], separator: str = ", ") -> str:
    text = separator.join(map(str, items))
    return text if len(text) <= _WIDEST_CELL else f"{text[: _WIDEST_CELL - 1]}…"


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for index, row in enumerate(rows):
        *cells, last = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join([*cells, row[-1].rjust(len(last))]).rstrip()
        if index == 0:
            yield "  ".join("─" * width for width in widths)


@dataclass
class _OpenCall:
    """A call that is going on."""

    func: Callable[..., Any]
    inputs: tuple[TensorNote, ...]
    began: int
    by: str = ""
    moves: list[Move] = field(default_factory=list)
    inner: int = 0
    """Bytes sent by calls inside of this one, which have records of their own."""
    nested: bool = False


class _Explainer(CallObserver):
    def __init__(self, collectives: Trace) -> None:
        self.explanation = Explanation()
        self._collectives = collectives
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
            return  # opened inside of a call
        frame = stack.pop()
        sent = sum(record.bytes for record in self._collectives.records[frame.began :])
        own = sent - frame.inner
        outputs = tuple(map(_note, tensors_within(result)))
        if _is_op(frame, outputs, own):
            name = _name(frame.func)
            record = Record(name, frame.inputs, outputs, frame.by, tuple(frame.moves), own)
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
        if stack and not backward and stack[-1].func not in _RUN_PROGRAMS:
            stack[-1].moves.append(move)
            return
        if stack:
            stack[-1].inner += plan.wire_bytes
        op = "(gradient)" if backward else "redistribute"
        self.explanation.records.append(Record(op, (), (), "", (move,), move.bytes))


# Inside of these the program itself goes on: hooks, recomputed parts.
_RUN_PROGRAMS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def _is_op(frame: _OpenCall, outputs: tuple[TensorNote, ...], sent: int) -> bool:
    """Whether it did something itself: not a question about metadata, nor a mere caller of ops."""
    if frame.by or frame.moves or sent > 0:
        return True
    return bool(outputs) and not frame.nested


def _name(func: Callable[..., Any]) -> str:
    return public_name(func).removeprefix("torch.nn.functional.").removeprefix("torch.")


def _note(tensor: Tensor) -> TensorNote:
    if not isinstance(tensor, DTensor):
        return TensorNote(tuple(tensor.shape), tensor.dtype, None)
    spec = tensor._spec
    layout = spec.layout
    return TensorNote(tuple(spec.shape), spec.tensor_meta.dtype, layout.placements, layout)


@contextmanager
def explain() -> Iterator[Explanation]:
    """See every op on DTensors: layouts in and out, what was redistributed, bytes, and why.

    Nothing is communicated for it. It nests. It sees all threads of the process, and backward too,
    where there are only redistributions to be seen, since backward runs below DTensors. Outside of
    the block it costs nothing; inside of it ops take the slow path.

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
    explanation = watcher.explanation
    rest = collectives.bytes() - explanation.bytes
    if rest > 0:
        explanation.records.append(Record("(other)", (), (), "", (), rest))
