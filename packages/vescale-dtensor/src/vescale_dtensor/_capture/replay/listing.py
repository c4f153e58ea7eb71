"""The listing of a program: its code, with layouts, ops and bytes as comments."""

from __future__ import annotations

from typing import Any

from torch import fx

from vescale_dtensor._capture.record.regions import every_node

_WIDEST = 88
_STEPS = ("call_function", "call_method")


def listing(graph: fx.Graph) -> str:
    """One line for each step of a graph, and a total."""
    # Of a region that backward computes again the steps alone, further to the right.
    nodes = [node for node in every_node(graph) if node.graph is graph or node.op in _STEPS]
    rows = [_row(node, node.graph is not graph) for node in nodes if node.op != "get_attr"]
    width = min(_WIDEST, max((len(code) for code, _ in rows), default=0))
    lines = [f"{code:<{width}}  # {note}" if note else code for code, note in rows]
    records = [record for node in nodes for record in node.meta.get("records", ())]
    steps = sum(node.op in _STEPS for node in nodes)
    sent = sum(record.bytes for record in records)
    total = f"{steps} steps, {len(records)} collectives, {sent:,} bytes sent by this rank"
    return "\n".join([*lines, total])


def _row(node: fx.Node, again: bool) -> tuple[str, str]:
    """The code of a node, and the comment on it; `again`: it is inside of a region."""
    if node.op == "output":
        return f"return {_value(node.args[0])}", ""
    if node.op == "placeholder":
        return str(node), _note(node)
    return f"{'    ' * again}{node} = {_call(node)}", _note(node)


def _call(node: fx.Node) -> str:
    """A step as Python code."""
    if node.op == "call_method":
        first, *rest = node.args
        return f"{_value(first)}.{node.target}({_arguments(rest, node.kwargs)})"
    name = getattr(node.target, "__name__", str(node.target))
    if name == "getitem":
        return f"{_value(node.args[0])}[{_value(node.args[1])}]"
    if name == "getattr":
        return f"{_value(node.args[0])}.{node.args[1]}"
    return f"{name}({_arguments(node.args, node.kwargs)})"


def _arguments(args: Any, kwargs: dict[str, Any]) -> str:
    """The arguments of a step as Python code."""
    return ", ".join([*map(_value, args), *(f"{k}={_value(v)}" for k, v in kwargs.items())])


def _value(value: Any) -> str:
    """One argument as Python code."""
    if isinstance(value, list | tuple):
        inside = ", ".join(map(_value, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return ":".join("" if part is None else _value(part) for part in parts)
    return str(value)


def _note(node: fx.Node) -> str:
    """What a step gives, sends and comes from."""
    layout = node.meta.get("layout") or node.meta.get("local", "")
    parts = [layout] if layout else []
    for record in node.meta.get("records", ()):
        parts.append(f"{record.op} over {record.group}, {record.bytes:,} B")
    if node.meta.get("op"):
        parts.append(node.meta["op"])
    return "; ".join(parts)
