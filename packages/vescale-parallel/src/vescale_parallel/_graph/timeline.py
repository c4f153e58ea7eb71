"""The graph run on paper: computation on one line, communication and copies beside it.

A collective begins when it was started and the one before it has ended (one stream of collectives,
as backends have); its wait ends when it has. What computation waits for is exposed communication.
Copies to and from the host have a stream of their own, too, in which they follow each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from vescale_parallel._cost import Link, collective_seconds, require_rates
from vescale_parallel._errors import GraphError
from vescale_parallel._graph.collectives import Collective, collectives, is_wait, schema_name
from vescale_parallel._graph.host_ops import copy_kind
from vescale_parallel._graph.machine import HOST_LINK, Machine

_WIDTH: Final = 1200
_ROW: Final = 26
_LEFT: Final = 110
_LINES: Final = ("computation", "communication", "copies")
_COLOURS: Final = {
    "forward": "#8ecae6", "backward": "#ffb703", "total": "#90be6d", "update": "#cdb4db",
    "": "#84a59d", "wait": "#e63946", "communication": "#6d597a",
}  # fmt: skip


@dataclass(frozen=True)
class Span:
    """One thing that takes time.

    Attributes:
        name: of the node.
        line: "computation", "communication" or "copies".
        kind: the direction of an operation, "wait", or the kind of a collective.
        start, end: seconds from the beginning.
        module: that the operation is of, by its name in the model; "" if it is of none.
        source: the user's line that the operation comes from, or the parameter that is sent.
    """

    name: str
    line: str
    kind: str
    start: float
    end: float
    module: str = ""
    source: str = ""


@dataclass(frozen=True)
class Timeline:
    """When everything of a graph runs.

    Attributes:
        spans: by their starts, those that take no time left out.
    """

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max((one.end for one in self.spans), default=0.0)

    @property
    def computing(self) -> float:
        """Seconds in which something is computed."""
        return self._sum(lambda one: one.line == "computation" and one.kind != "wait")

    @property
    def communicating(self) -> float:
        """Seconds in which something is sent."""
        return self._sum(lambda one: one.line == "communication")

    @property
    def copying(self) -> float:
        """Seconds in which something is copied to or from the host."""
        return self._sum(lambda one: one.line == "copies")

    @property
    def exposed(self) -> float:
        """Seconds in which computation waits for communication, or for copies."""
        return self._sum(lambda one: one.kind == "wait")

    @property
    def _lines(self) -> tuple[str, ...]:
        # Most graphs copy nothing, and an empty line would only be asked about.
        return (*_LINES[:2], *(["copies"] if self.copying else []))

    def _sum(self, of: Callable[[Span], bool]) -> float:
        return sum(one.end - one.start for one in self.spans if of(one))

    def __str__(self) -> str:
        copying = f", copying {self.copying * 1e3:.3f}" if self.copying else ""
        return (
            f"{self.seconds * 1e3:.3f} ms: computing {self.computing * 1e3:.3f}, communicating "
            f"{self.communicating * 1e3:.3f}{copying}, of which {self.exposed * 1e3:.3f} are "
            "waited for"
        )

    def to_perfetto(self) -> str:
        """As JSON for https://ui.perfetto.dev."""
        lines = self._lines
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": at, "args": {"name": line}}
            for at, line in enumerate(lines)
        ]
        for one in self.spans:
            events.append(
                {
                    **{"ph": "X", "pid": 0, "tid": lines.index(one.line), "name": one.name},
                    # Traces count in microseconds.
                    **{"ts": one.start * 1e6, "dur": (one.end - one.start) * 1e6, "cat": one.kind},
                    "args": {"module": one.module, "source": one.source},
                }
            )
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def to_svg(self) -> str:
        """As a picture: time from left to right, computation above communication."""
        # An empty graph takes no time at all.
        scale = _WIDTH / max(self.seconds, 1e-12)
        drawn = [f'<text x="4" y="14">{escape(str(self))}</text>']
        for row, line in enumerate(self._lines):
            top = 24 + row * (_ROW + 8)
            drawn.append(f'<text x="4" y="{top + 17}">{line}</text>')
            for one in self.spans:
                if one.line == line:
                    colour = _COLOURS.get(one.kind, _COLOURS["communication"])
                    # However short, it can be seen and pointed at.
                    wide = max((one.end - one.start) * scale, 0.2)
                    took = f"{one.name}: {(one.end - one.start) * 1e6:.1f} us"
                    told = "\n".join(filter(None, (took, one.module, one.source)))
                    drawn.append(
                        f'<rect x="{_LEFT + one.start * scale:.2f}" y="{top}" width="{wide:.2f}" '
                        f'height="{_ROW}" fill="{colour}"><title>{escape(told)}</title></rect>'
                    )
        size = f'width="{_WIDTH + _LEFT + 20}" height="{len(self._lines) * (_ROW + 8) + 34}"'
        style = 'font-family="sans-serif" font-size="12"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(drawn)}</svg>'


def timeline(
    graph: fx.GraphModule,
    *,
    machine: Machine | None = None,
    link: Link | None = None,
    flops: float | None = None,
    memory_bandwidth: float | None = None,
    seconds: Mapping[str, float] | None = None,
    host: Link | None = None,
) -> Timeline:
    """Run a graph on paper. Not collective; nothing is executed.

    Args:
        graph: whose nodes say what they make (`meta["val"]`), as traced ones do.
        machine: what it runs on, as `calibrate` measured it.
        link: by which collectives travel; in place of the machine's, as are the next two.
        flops: floating-point operations a second of matrix products, as reached.
        memory_bandwidth: bytes a second that an operation reads and writes.
        seconds: of nodes by name, where they were measured; the others are estimated: the longer of
            what flops and bytes take.
        host: the link to memory of the host, if the graph copies to it.

    Raises:
        GraphError: rates that are missing or not positive; nodes that say nothing of what they
            make.
    """
    rates = _rates(machine, link, flops, memory_bandwidth, host)
    known = seconds or {}

    def took(node: fx.Node) -> float:
        one = found.get(node)
        if one is not None:
            return known.get(node.name, _sending(one, rates.link))
        if copy_kind(node):
            return known.get(node.name, _copying(node, rates.host))
        return known.get(node.name, computing_seconds(node, rates.flops, rates.memory_bandwidth))

    found = {one.start: one for one in collectives(graph.graph)}
    spans: list[Span] = []
    now = 0.0  # of computation
    free = {"communication": 0.0, "copies": 0.0}  # when the last one of each ends
    ends: dict[fx.Node, float] = {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        copy = copy_kind(node)
        if node in found or copy in ("to_host", "to_device"):
            kind, line = (copy, "copies") if copy else (found[node].kind, "communication")
            # Started where the program has come to, and carried out when the stream is free.
            begin = max(now, free[line])
            free[line] = ends[node] = begin + took(node)
            spans.append(Span(node.name, line, kind, begin, free[line], *_origin(node)))
        elif is_wait(node) or copy:
            awaited: Any = node.args[0]
            end = ends[awaited]
            # Only what is left of it: the rest went by while something was computed.
            if end > now:
                spans.append(Span(node.name, "computation", "wait", now, end))
            now = max(now, end)
        else:
            kind = str(getattr(node.meta.get("label"), "direction", ""))
            each = took(node)
            if each > 0:
                spans.append(Span(node.name, "computation", kind, now, now + each, *_origin(node)))
            now += each
    return Timeline(tuple(sorted(spans, key=lambda one: (one.start, one.line))))


class _Rates(NamedTuple):
    """By which a graph is run on paper, see `timeline`."""

    link: Link
    flops: float
    memory_bandwidth: float
    host: Link


def _rates(
    machine: Machine | None,
    link: Link | None,
    flops: float | None,
    memory_bandwidth: float | None,
    host: Link | None,
) -> _Rates:
    """What was passed, and the machine's in place of what was not."""
    if machine is not None:
        link = machine.link if link is None else link
        host = machine.host if host is None else host
        flops = machine.flops if flops is None else flops
        given = memory_bandwidth
        memory_bandwidth = machine.memory_bandwidth if given is None else given
    if link is None or flops is None or memory_bandwidth is None:
        raise GraphError(
            "timeline: pass machine=graph.calibrate(), or all of link=, flops=, memory_bandwidth="
        )
    require_rates(GraphError, flops=flops, memory_bandwidth=memory_bandwidth)
    return _Rates(link, flops, memory_bandwidth, host or HOST_LINK)


def _origin(node: fx.Node) -> tuple[str, str]:
    """The module that a node is of, and the user's line or the parameter."""
    label = node.meta.get("label")
    source = getattr(label, "line", "") or getattr(label, "parameter", "")
    return str(getattr(label, "module", "")), str(source)


def _sending(one: Collective, link: Link) -> float:
    # An all-to-all and a broadcast count as an all-gather of what is given.
    return collective_seconds(one.kind, one.bytes, len(one.ranks), link)


def _copying(node: fx.Node, host: Link) -> float:
    given: Any = node.args[0]
    value = given.meta.get("val") if copy_kind(node) == "to_host" else node.meta.get("val")
    return host.latency + _bytes([value]) / host.bandwidth


def computing_seconds(node: fx.Node, flops: float, memory_bandwidth: float) -> float:
    """Return the longer of what its flops and its bytes take; nothing for what only looks."""
    # What only looks at its argument, and writes to nothing, runs no kernel.
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None or all(one.alias_info is not None for one in schema.returns):
        writes = schema is not None and schema.is_mutable
        if not writes:
            return 0.0
    values = [node.meta.get("val"), *(one.meta.get("val") for one in node.all_input_nodes)]
    moved = sum(_bytes(tree_leaves(value)) for value in values)
    return max(_flops(node) / flops, moved / memory_bandwidth)


def _bytes(values: Sequence[Any]) -> int:
    return sum(prod(one.shape) * one.itemsize for one in values if isinstance(one, Tensor))


_COUNTED: Final = ("mm", "bmm", "conv", "attention")


def _flops(node: fx.Node) -> float:
    # To count is to run the node without values, which takes longer than all else here.
    if not any(one in schema_name(node) for one in _COUNTED):
        return 0.0
    # That in which the values were made: fake tensors of two modes do not mix.
    mode = next(
        (getattr(one.meta.get("val"), "fake_mode", None) for one in node.all_input_nodes), None
    )
    if mode is None:
        raise GraphError(f"node '{node.name}' says nothing of its shapes (meta['val'])")
    counter = FlopCounterMode(display=False)
    given = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    with mode, torch.no_grad(), counter:
        node.target(*given[0], **given[1])  # type: ignore[operator]
    return float(counter.get_total_flops())
