"""Random fills as one functional operator: `vescale_dtensor::filled(like, draw)`.

Traced as they are, fills become writes of a `torch.Generator`, which compilers refuse, and several
operators each, whose order among themselves is the stream. The operator is tagged as seeded and
nondeterministic, so that dead code elimination and the merging of equal nodes keep every draw: each
moves the stream, also where its numbers are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
import vescale_rng
from torch import Tensor, fx

from vescale_dtensor._errors import CaptureError

_EMPTY: Final = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})
_numbers = count()


@dataclass(frozen=True, eq=False)
class Draw:
    """What a node draws.

    Attributes:
        name: by which the operator knows it, of this process.
        distribution: what to draw.
        layout: which elements of the global tensor.
        generator: None is torch's default.
        policy: of random numbers.
    """

    name: str
    distribution: Any
    layout: Any
    generator: Any
    policy: str

    def __deepcopy__(self, memo: Any) -> Draw:
        """Itself: copies of a graph draw from the same generator, and name the same draw."""
        return self


# Weak: a draw lives as long as a graph that has it (on its node, which copies of graphs keep).
_draws: WeakValueDictionary[str, Draw] = WeakValueDictionary()


def _fill(like: Tensor, draw: str) -> Tensor:
    known = _draws.get(draw)
    if known is None:
        raise RuntimeError(f"draw {draw!r} belongs to a joint graph that is gone: keep the graph")
    result = torch.empty_like(like)
    with vescale_rng.use(known.policy):
        return vescale_rng.fill_(result, known.distribution, known.layout, known.generator)


def _fake(like: Tensor, draw: str) -> Tensor:
    return torch.empty_like(like)


_OPERATOR: Final = "vescale_dtensor::filled"
_library: Any = torch.library.Library("vescale_dtensor", "FRAGMENT")  # type: ignore[no-untyped-call]
if not hasattr(torch.ops.vescale_dtensor, "filled"):  # a module may be imported anew
    _library.define(
        "filled(Tensor like, str draw) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
    )
    _library.impl("filled", _fill, "CompositeExplicitAutograd")
    torch.library.register_fake(_OPERATOR, _fake, lib=_library)


def with_functional_draws(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[str, Draw]]:
    """A copy of a program's graph whose fills are operators, and what they draw, by name.

    Raises:
        CaptureError: a draw that is no fill.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    for node, copied in copies.items():
        copied.meta = dict(node.meta)
    draws = {}
    for node in list(graph.nodes):
        if node.target is vescale_rng.fill_:
            draw = _draw_of(node, module)
            draws[draw.name] = _draws[draw.name] = draw
            _replace(graph, node, draw.name)
        elif str(getattr(node.target, "__module__", "")).startswith("vescale_rng"):
            # Traced through, it would leave the stream where this call left it.
            raise CaptureError(
                f"joint: {node.meta.get('op')} at {node.meta.get('line')} draws in a way that a "
                "graph has no operator for (on an accelerator, or values that decide how many "
                "numbers are drawn). Draw outside of the step, on CPU"
            )
    graph.lint()
    return fx.GraphModule(module, graph, "Program"), draws


def draw_of(node: fx.Node) -> str | None:
    """The name of what a node draws; None if it is no draw of ours."""
    if node.op != "call_function" or getattr(node.target, "_schema", None) is None:
        return None
    schema: Any = node.target._schema  # type: ignore[union-attr]
    return str(node.args[1]) if schema.name == _OPERATOR else None


def _draw_of(node: fx.Node, module: fx.GraphModule) -> Draw:
    given = dict(zip(("local", "distribution", "layout", "generator"), node.args, strict=False))
    given |= node.kwargs
    found: list[Any] = [
        getattr(module, str(value.target)) if isinstance(value, fx.Node) else value
        for value in (given.get("distribution"), given.get("layout"), given.get("generator"))
    ]
    return Draw(f"draw_{next(_numbers)}", found[0], found[1], found[2], vescale_rng.policy())


def _replace(graph: fx.Graph, node: fx.Node, name: str) -> None:
    """Put the operator in the place of a fill."""
    local = node.args[0] if node.args else node.kwargs["local"]
    assert isinstance(local, fx.Node)
    with graph.inserting_before(node):
        made = graph.call_function(torch.ops.vescale_dtensor.filled.default, (local, name))
        made.meta = dict(node.meta)
        target = getattr(local.target, "__name__", local.target)
        # Memory that nothing else looks at: what is drawn takes its place.
        if target in _EMPTY and list(local.users) == [node, made]:
            node.replace_all_uses_with(made)
        else:
            written = graph.call_method("copy_", (local, made))
            written.meta = dict(node.meta)
            node.replace_all_uses_with(written)
    graph.erase_node(node)
