"""`torch.nn.utils.clip_grad_norm_` in a joint graph: captured on gradients, and put in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import get_total_norm

from vescale_dtensor._autograd.cotangent import cotangent_layout
from vescale_dtensor._capture.capture import capture
from vescale_dtensor._capture.guard.call_key import KeyedCall
from vescale_dtensor._capture.replay.program import Program
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._joint.builder import Builder
from vescale_dtensor._joint.labels import Label
from vescale_dtensor._layout.placements import Replicate
from vescale_dtensor._layout.spec import Spec, spec_of
from vescale_dtensor._tensor.dtensor import DTensor, wrap

_CALLS: Final = 3
aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Clip:
    """What gradients are clipped to.

    Attributes:
        max_norm, norm_type: as of `clip_grad_norm_`.
    """

    max_norm: float
    norm_type: float = 2.0


def add_clip(
    make: Builder, clip: Clip, leaves: Sequence[DTensor], totals: Sequence[fx.Node]
) -> tuple[fx.Node, Spec | None]:
    """Clip these gradients in place. Collective: the norm of zeros is taken.

    Returns:
        The node of the norm's local tensor, and its spec; None where it is plain.

    Raises:
        CaptureError: the norm could not be recorded.
    """
    program, places = _recorded(clip, leaves)
    make.label = Label("update", "clip_grad_norm_")
    with torch.no_grad():
        values = [totals[at].meta["val"] for at in places]
        traced = make_fx(program.module, tracing_mode="fake")(*values)
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    copies = {node: totals[at] for node, at in zip(inputs, places, strict=True)}
    found = _put_in(make, traced, copies)
    # Both are tensors that the function makes: their makers name a place among the results.
    made: Any = program.outputs.makes
    norm, factor = made
    for total in totals:
        make(aten.mul_.Tensor, total, found[factor.place])
    make.label = None
    return found[norm.place], getattr(norm, "spec", None)


def _recorded(clip: Clip, leaves: Sequence[DTensor]) -> tuple[Program, list[int]]:
    """The norm of gradients and the factor, as a program; which gradient each argument is."""

    def norm_and_factor(*gradients: Tensor) -> tuple[Tensor, Tensor]:
        norm = get_total_norm(gradients, clip.norm_type)
        # As torch's `clip_grads_with_norm_` has it, which returns no factor.
        factor = torch.clamp(clip.max_norm / (norm + 1e-6), max=1.0)
        return _replicated(norm), _replicated(factor)

    given = tuple(map(_zeros, leaves))
    with torch.no_grad():
        captured = capture(norm_and_factor)
        # As often on all ranks: it communicates, and may be recorded later on some.
        for _ in range(_CALLS):
            captured(*given)
        call = KeyedCall(given, {})
    for program in captured.programs:
        places = [one.index for one in program.sources]
        if program.key == call.key and all(one is not None for one in places):
            return program, [at for at in places if at is not None]
    raise CaptureError("joint: the norm of the gradients could not be recorded")


def _replicated(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value
    whole: Tensor = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    return whole


def _put_in(
    make: Builder, traced: fx.GraphModule, copies: dict[fx.Node, fx.Node]
) -> Sequence[fx.Node]:
    """Copy a graph in; returns the copies of its results."""
    graph = make.graph
    with graph.inserting_before(graph.output_node()):
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "get_attr":
                raise CaptureError("joint: the norm of the gradients needs a constant tensor")
            if node.op == "output":
                found: Sequence[fx.Node] = fx.node.map_arg(node.args[0], copies.__getitem__)
                return found
            copy = copies[node] = graph.node_copy(node, copies.__getitem__)
            copy.meta = dict(node.meta)
            copy.meta["label"] = make.label
    raise AssertionError("a graph ends with its output")


def _zeros(leaf: DTensor) -> DTensor:
    """A tensor like the complete gradient of a parameter."""
    spec = leaf._spec
    layout = cotangent_layout(spec.layout, 0).with_order(spec.layout.order)
    local = torch.zeros_like(leaf._local_tensor.detach())
    return wrap(local, spec_of(layout, spec.shape, spec.tensor_meta.dtype))
