"""A joint graph with clipping and the update of its parameters behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.optim import Optimizer

from vescale_dtensor._capture.program import Program
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._joint.builder import Builder, copied
from vescale_dtensor._joint.clipping import Clip, add_clip
from vescale_dtensor._joint.storage import ParameterStorage
from vescale_dtensor._joint.tracing import describe_memory
from vescale_dtensor._joint.update import Update, add_update, plan_update
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._tensor.dtensor import DTensor

aten: Any = torch.ops.aten


class JointGraph(Protocol):
    """A joint graph as it is traced: see `Joint`."""

    @property
    def graph_module(self) -> fx.GraphModule:
        """Results of the step, then gradients."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Their names."""

    @property
    def _program(self) -> Program: ...

    @property
    def _leaves(self) -> tuple[DTensor, ...]: ...

    @property
    def _stored(self) -> tuple[ParameterStorage, ...]: ...


def with_update(
    whole: JointGraph, optimizer: Optimizer, clip: Clip | None
) -> tuple[fx.GraphModule, Update, tuple[int, ...], Spec | None]:
    """Add clipping and an update to a copy of a graph.

    Returns:
        The graph, which returns the results of the step, the norm where gradients are clipped, and
        the gradients of what the optimizer does not step; what feeds its new inputs; which
        gradients those are; the spec of the norm.

    Raises:
        CaptureError: see `Joint.with_optimizer`.
    """
    module, _ = copied(whole.graph_module)
    graph = module.graph
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    split = len(results) - len(whole._leaves)
    totals = {
        id(leaf): node
        for leaf, node in zip(whole._leaves, results[split:], strict=True)
        if node is not None
    }
    names = {id(leaf): name for leaf, name in zip(whole._leaves, whole.parameters, strict=True)}
    update = plan_update(optimizer, {one: name for one, name in names.items() if one in totals})
    if not update.stepped:
        raise CaptureError("joint: the optimizer steps no parameter that gets a gradient")
    make = Builder(graph)
    extra, spec = [], None
    if clip is not None:
        leaves = _as_models_have(whole._program.modules, [one.leaf for one in update.stepped])
        norm, spec = add_clip(make, clip, leaves, [totals[id(one)] for one in leaves])
        extra = [norm]
    add_update(make, update, _local_nodes(make, whole), totals)
    own = {id(one.leaf) for one in update.stepped}
    rest = tuple(at for at, leaf in enumerate(whole._leaves) if id(leaf) not in own)
    output.args = ([*results[:split], *extra, *(results[split + at] for at in rest)],)
    describe_memory(graph)
    graph.lint()
    module.recompile()
    return module, update, rest, spec


def outermost_first(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """These modules, those first that are part of no other one."""
    known = list(modules)
    inner = {id(part) for one in known for part in one.children()}
    return sorted(known, key=lambda one: id(one) in inner)


def _as_models_have(modules: Iterable[nn.Module], leaves: Sequence[DTensor]) -> list[DTensor]:
    """Parameters in the order of `model.parameters()`; what no model has comes last."""
    # Groups of an optimizer have another one, and a norm that is added up in it other bits.
    found = (parameter for one in outermost_first(modules) for parameter in one.parameters())
    at = {one: number for number, one in enumerate(dict.fromkeys(map(id, found)))}
    return sorted(leaves, key=lambda one: at.get(id(one), len(at)))


def _local_nodes(make: Builder, whole: JointGraph) -> dict[int, fx.Node]:
    """The node of the local tensor of each parameter, by its id."""
    nodes = list(make.graph.nodes)
    own = [node for node in nodes if "parameter" in node.meta]
    count = len(own)
    found = {id(leaf): node for leaf, node in zip(whole._leaves[:count], own, strict=True)}
    inputs = {node.meta["stored"]: node for node in nodes if "stored" in node.meta}
    for each in whole._stored:
        for leaf, where in zip(each.stored, each.slices, strict=True):
            node = inputs[each.name, where.index]
            if where.start is not None:
                node = make(aten.slice.Tensor, node, 0, where.start, where.end)
            found[id(leaf)] = node
    return found
