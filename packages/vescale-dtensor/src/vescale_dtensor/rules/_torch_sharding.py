"""`register_sharding`: takes rules that were written for torch's own decorator of this name.

Such a rule is a list of acceptable shardings on one mesh axis, each with a placement for every
output and every argument. It does not state shapes, so those of the outputs come from the operator,
called on tensors without data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from vescale_comm.nested import tensors_within

from vescale_dtensor._errors import RuleError
from vescale_dtensor._layout.derived_placements import as_placement
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._layout.placements import Partial, Replicate, Shard
from vescale_dtensor._layout.spec import order_of
from vescale_dtensor._planning.op_call import OpCall, Reads
from vescale_dtensor._planning.plan import Rule, function_name
from vescale_dtensor._planning.strategy import AxisStrategy, Strategy
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import no_torch_function
from vescale_dtensor.rules._registration import register_rule

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class OperandInfo:
    """What a sharding function gets in place of a tensor.

    Attributes:
        shape, dtype: global.
        placements: one per mesh axis, those of the operand; empty for a plain tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    placements: tuple[Placement, ...]

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)


def register_sharding(op: Any) -> Callable[[F], F]:
    """Register a function that lists acceptable shardings, like torch's decorator of this name.

    The function takes the operator's arguments, with an `OperandInfo` for each tensor, and returns
    pairs for one mesh axis: a placement per output, and a placement per argument, None for one that
    is no tensor. All replicated is always acceptable, and need not be in the list. torch's
    placements are accepted.

    Shapes of outputs come from the operator itself, called on tensors without data, so a custom
    operator needs `register_fake`. A sharding that names dims of different extents is used only if
    the number of ranks divides all of them.

    Args:
        op: a function or operator as `register_rule` takes it, or a list of them. Unlike torch's,
            these rules are looked up by the function that the user calls: one for
            `torch.ops.aten._softmax.default` does not serve `torch.softmax`.

    Raises:
        RuleError: as `register_rule` does; and when a call is planned, a list whose entries do not
            fit the call.

    Examples:
        @register_sharding(torch.ops.mylib.scale)
        def scale_sharding(x, factor):
            return [([Shard(d)], [Shard(d), None]) for d in range(x.ndim)]
    """

    def register(function: F) -> F:
        for each in op if isinstance(op, list | tuple) else [op]:
            name = getattr(function, "__name__", "sharding")
            rule = Rule(name, _Sharding(function), reads=Reads.NUMBERS | Reads.SHAPES)
            register_rule(each, rule)
        return function

    return register


@dataclass(frozen=True)
class _Sharding:
    """A rule's strategy function, made of a sharding function."""

    function: Callable[..., Any]

    def __call__(self, call: OpCall) -> Strategy:
        # Any of the layouts: only its mesh is used.
        layout = next(o._spec.layout for o in call.operands if isinstance(o, DTensor))
        outputs = _outputs(call)
        args, kwargs = call.replaced([_info(operand) for operand in call.operands])
        replicated = AxisStrategy(
            (Replicate(),) * len(call.operands), (Replicate(),) * len(outputs)
        )
        listed = self.function(*args, **kwargs)
        found = [_candidate(one, call, outputs, layout) for one in listed]
        return Strategy(
            (replicated, *(one for one in found if one is not None)),
            shapes=tuple(tuple(x.shape) for x in outputs),
            output_orders=tuple(order_of(tuple(x.shape), x.stride()) for x in outputs),
        )


def _info(operand: Tensor) -> OperandInfo:
    """What the sharding function gets in place of an operand."""
    placements = operand._spec.layout.placements if isinstance(operand, DTensor) else ()
    return OperandInfo(operand.shape, operand.dtype, placements)


def _outputs(call: OpCall) -> list[Tensor]:
    """The results of the call on tensors without data, which have the global shapes.

    Raises:
        RuleError: the operator cannot run on such.
    """
    with torch.no_grad(), no_torch_function():
        args, kwargs = call.replaced([_without_data(operand) for operand in call.operands])
        try:
            return tensors_within(call.func(*args, **kwargs))
        except NotImplementedError as error:
            raise RuleError(
                f"register_sharding: {function_name(call.func)} does not run on tensors without "
                "data, which tell the shapes of its outputs; give it a fake implementation with "
                "torch.library.register_fake, or state them in a Strategy"
            ) from error


def _without_data(operand: Tensor) -> Tensor:
    if isinstance(operand, DTensor):
        meta = operand._spec.tensor_meta
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
    return torch.empty_strided(operand.shape, operand.stride(), dtype=operand.dtype, device="meta")


def _candidate(
    listed: Any, call: OpCall, outputs: Sequence[Tensor], layout: Layout
) -> AxisStrategy | None:
    """One acceptable sharding as a candidate; None if its shards would not match.

    Raises:
        RuleError: it does not have a placement for every tensor.
    """
    results, operands = (_present(each, call) for each in _pair(listed, call))
    if len(results) != len(outputs) or len(operands) != len(call.operands):
        raise RuleError(
            f"register_sharding: {function_name(call.func)} has {len(outputs)} outputs and "
            f"{len(call.operands)} tensors among its arguments, but {listed!r} has placements for "
            f"{len(results)} and {len(operands)}"
        )
    tensors = [*call.operands, *outputs]
    placed = [_of_tensor(p, x, call) for p, x in zip(operands + results, tensors, strict=True)]
    count = len(operands)
    inputs, produced = tuple(placed[:count]), tuple(placed[count:])
    shards = zip(tensors, placed, strict=True)
    extents = {x.shape[p.dim] for x, p in shards if isinstance(p, Shard)}
    if len(extents) <= 1:
        return AxisStrategy(inputs, produced)
    # Uneven shards of different extents do not correspond to each other: 5 over 4 ranks is 2, 2, 1,
    # 0, but 10 is 3, 3, 3, 1. Divided by all ranks, shards are even, whichever axes shard the dim.
    ranks = layout.mesh.size()
    if any(extent % ranks for extent in extents):
        return None
    return AxisStrategy(inputs, produced, fixed_placement=True)


def _pair(listed: Any, call: OpCall) -> tuple[Any, Any]:
    """Placements of outputs and of arguments.

    Raises:
        RuleError: an entry of the list that is no pair.
    """
    if isinstance(listed, list | tuple) and len(listed) == 2:
        return listed[0], listed[1]
    raise RuleError(
        f"register_sharding: {function_name(call.func)}: expected pairs (placements of outputs, "
        f"placements of arguments), found {listed!r}"
    )


def _present(placements: Any, call: OpCall) -> list[Any]:
    """The placements of tensors, without the None of other arguments.

    Raises:
        RuleError: no list of placements.
    """
    if not isinstance(placements, list | tuple):
        raise RuleError(
            f"register_sharding: {function_name(call.func)}: expected a list of placements, "
            f"found {placements!r}"
        )
    return [p for p in placements if p is not None]


def _of_tensor(given: object, x: Tensor, call: OpCall) -> Placement:
    """One of our placements, checked against the tensor, with a non-negative dim.

    Raises:
        RuleError: a kind that no rule can name, or a dim that the tensor lacks.
    """
    placement = as_placement(given)
    if type(placement) not in (Replicate, Shard, Partial):
        raise RuleError(
            f"register_sharding: {function_name(call.func)}: {placement!r} is not one of "
            "Replicate, Shard and Partial; a Shard stands for uneven ones, too"
        )
    if not isinstance(placement, Shard):
        return placement
    if not -x.ndim <= placement.dim < x.ndim:
        raise RuleError(
            f"register_sharding: {function_name(call.func)}: {placement} of a tensor of shape "
            f"{list(x.shape)}"
        )
    return Shard(placement.dim % x.ndim)
