"""Describes activations that the first forward gathered over the batch: these do not scale.

From there on every rank computes the same. Which operator does so is known when it runs, so the
first forward is watched: each redistribution that nobody asked for, with the module and the line.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Final

import torch
from torch import nn
from vescale_dtensor import DTensor, untraced
from vescale_dtensor.debug import watch_operands

from vescale_parallel._common.messages import human_bytes, table
from vescale_parallel._common.pickle_refusal import NotPickled

_LOG = logging.getLogger("vescale_parallel")
_WATCH: Final = "_gather_watch"
_LEAST: Final = 1 << 14
"""Bytes of a module's gathered tensors below which they are no matter, as counts of tokens are."""
_SHOWN: Final = 3
_PACKAGES: Final = frozenset({"torch", "vescale_dtensor", "vescale_parallel"})


@dataclass(frozen=True)
class GatherRow:
    """Tensors that operators of one module gathered in the first forward.

    Attributes:
        module: its name; "" is the model.
        kind: its class.
        axes: axes of the mesh that they were sharded over, or were partial sums over.
        bytes: of the whole tensors.
        calls: how many there were.
        line: of the first, in the user's program or a library.
    """

    module: str
    kind: str
    axes: tuple[str, ...]
    bytes: int
    calls: int
    line: str


def gather_rows(model: nn.Module) -> tuple[GatherRow, ...]:
    """Return what the first forward of a parallelised model gathered; before it, nothing."""
    watch = vars(model).get(_WATCH)
    return watch.rows() if isinstance(watch, GatherWatch) else ()


def install_gather_watch(model: nn.Module, axes: Sequence[str]) -> None:
    """Watch the first forward of a model whose batch lies over these axes, and warn once."""
    if not axes:
        return
    watch = GatherWatch(axes)
    vars(model)[_WATCH] = watch
    model.register_forward_pre_hook(watch.begin)
    # Never taken out again: whoever guards the hooks of a model would see another one.
    model.register_forward_hook(watch.end, always_call=True)


class GatherWatch(NotPickled):
    """The two hooks of a model, of which only the first pair of calls does anything."""

    def __init__(self, axes: Sequence[str]) -> None:
        self.axes = frozenset(axes)
        self._is_done = self._is_first = False
        self._open: ExitStack | None = None
        self._thread = 0
        self._names: dict[int, str] = {}
        self._found: dict[str, GatherRow] = {}

    def rows(self) -> tuple[GatherRow, ...]:
        """Return what was gathered, most first."""
        kept = [one for one in self._found.values() if one.bytes >= _LEAST]
        return tuple(sorted(kept, key=lambda one: -one.bytes))

    @untraced
    def begin(self, module: nn.Module, args: Any) -> None:
        """Begin, if this is the first forward that is trained."""
        if self._is_done or self._open is not None or not torch.is_grad_enabled():
            return
        self._names = {id(one): name for name, one in module.named_modules()}
        # Ranks of a simulation are threads of one process.
        self._thread = get_ident()
        self._open = ExitStack()
        self._open.enter_context(watch_operands(self._note))

    @untraced
    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """End, and say once what was found: each rank has found the same, and the first says it."""
        if self._open is None:
            return
        self._open.close()
        self._open, self._names = None, {}
        if output is None:  # it failed, and the next one is watched
            self._found = {}
            return
        self._is_done = True
        rows = self.rows()
        if rows and self._is_first:
            _LOG.warning("%s", _words(rows))

    def _note(self, operand: DTensor, placements: tuple[Any, ...]) -> None:
        # Parameters are gathered where a plan shards them so.
        if get_ident() != self._thread or isinstance(operand, nn.Parameter):
            return
        mesh = operand.device_mesh
        moves = zip(mesh.mesh_dim_names or (), operand.placements, placements, strict=False)
        axes = tuple(
            name
            for name, old, new in moves
            # Partial sums as well: what a rank finds of all rows in its own.
            if name in self.axes and not old.is_replicate() and new.is_replicate()
        )
        if not axes:
            return
        self._is_first = not any(mesh.get_coordinate() or ())
        name, kind, line = self._where()
        size = operand.numel() * operand.element_size()
        known = self._found.get(name)
        if known is None:
            self._found[name] = GatherRow(name, kind, axes, size, 1, line)
        else:
            axes = tuple(dict.fromkeys((*known.axes, *axes)))
            total, calls = known.bytes + size, known.calls + 1
            self._found[name] = GatherRow(name, known.kind, axes, total, calls, known.line)

    def _where(self) -> tuple[str, str, str]:
        """The innermost module of the model that runs, its class, and the line that led here."""
        line = ""
        for frame in _frames():
            package = str(frame.f_globals.get("__name__")).partition(".")[0]
            if not line and package not in _PACKAGES:
                line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) in self._names:
                return self._names[id(module)], type(module).__name__, line
        return "", "the model", line


def _frames() -> Iterator[Any]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def _words(rows: Sequence[GatherRow]) -> str:
    shown = [
        f"'{one.module or '(the model)'}' ({one.kind}): {human_bytes(one.bytes)} over "
        f"{', '.join(one.axes)}, at {one.line}"
        for one in rows[:_SHOWN]
    ]
    more = f", and {len(rows) - _SHOWN} modules more" if len(rows) > _SHOWN else ""
    return (
        "the first forward gathered activations, of which every rank then computes all, however "
        f"many there are: {'; '.join(shown)}{more}. That is right, and does not scale. Where what "
        "such a module makes of a row depends on that row alone, write "
        f"Plan(local_rows={_glob(rows[0].module)!r}), which check_local_rows proves on your batch. "
        "plan.explain(model, mesh) lists all."
    )


def _glob(module: str) -> str:
    """One glob for the modules of all blocks."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module) or "*"


def gather_table(rows: Sequence[GatherRow]) -> str:
    """Return the table that `explain` prints of a model that has run."""
    cells = [
        (one.module or "(the model)", ", ".join(one.axes), human_bytes(one.bytes), one.line)
        for one in rows
    ]
    header = ["gathered within", "over", "bytes", "first at"]
    return table(header, cells, right=["bytes"])
