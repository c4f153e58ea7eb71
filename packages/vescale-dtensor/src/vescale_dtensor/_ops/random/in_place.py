"""In-place random operations: the numbers that one device would have drawn, by vescale_rng."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import vescale_rng
from torch import Tensor

from vescale_dtensor._autograd.local_use import recorded_local
from vescale_dtensor._dispatch.dispatch import by_rule
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.execution_events import log_of, note_numbers, record_draw
from vescale_dtensor._layout.rng_layout import rng_layout_of
from vescale_dtensor._ops.common.letters import broadcast_letters, letters
from vescale_dtensor._ops.random.on_meta import nothing_on_meta
from vescale_dtensor._ops.random.sampling import bernoulli_each_, draw_layout, forget, unexpanded
from vescale_dtensor._planning import LocalContext, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._tensor.lineage import pause
from vescale_dtensor._tensor.observers import observers
from vescale_dtensor._torch.compat import any_requires_grad

# So many elements of a `normal_` on CPU are drawn as one block, where memory has no gaps.
_BLOCK = 16


@nothing_on_meta
def _dropped(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    local: Tensor = unexpanded(args[0])
    return vescale_rng.dropout(
        local, context.call.argument(1, "p", 0.5), draw_layout(context, local)
    )


def _dropout_strategy(call: OpCall) -> Strategy | None:
    dims = letters(call.operands[0].ndim)
    return Signature((dims,), (dims,), elementwise=True, local=_dropped).strategy()


_DROPOUT = Rule("dropout", _dropout_strategy, Reads.NOTHING)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout` with the mask of one device."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    p = float(p)  # as torch takes True, and numpy's numbers
    # Nothing is drawn, so that the generator stays where one device leaves it.
    if not training or p == 0 or not isinstance(input, DTensor) or 0 in input._spec.shape:
        return input
    layout = input._spec.layout
    mesh = layout.mesh
    # Where nothing is compared, nothing is noted: asked once for the number and for the draw.
    compared = log_of(mesh) is not None
    if compared and not pause.depth:  # other ranks may replay what is recorded here
        note_numbers(mesh, "dropout", {"p": p})
    # The common case needs no plan. Observers want one, a partial operand is reduced first, and a
    # hidden node has to be joined to the graph: `may_have_hidden_node` is written out.
    recorded = input._local_tensor.requires_grad
    hidden = input._may_have_hidden_node or (not recorded and any_requires_grad(input))
    if not (inplace or observers or layout.partial or hidden or input._local_tensor.is_meta):
        return _dropped_without_plan(input, p, compared)
    result: Tensor = by_rule(_DROPOUT, F.dropout, (input, p, True, False), {})
    return input.copy_(result) if inplace else result


def _dropped_without_plan(input: DTensor, p: float, compared: bool) -> DTensor:
    """Dropout without a plan: elementwise, so the layout stays and nothing is sent."""
    spec = input._spec
    local = input._local_tensor
    if local.requires_grad and torch.is_grad_enabled():
        local = recorded_local(input, 0)
    strides = local.stride()
    if 0 in strides:  # `unexpanded` written out
        local = local.contiguous()
        strides = local.stride()
    if compared:
        record_draw(spec.layout.mesh, local, None)
    dropped = vescale_rng.dropout(local, p, rng_layout_of(spec, strides))
    return wrap(dropped, spec.dense if spec.has_gaps else spec)


def _torch_dropout(input: Tensor, p: float, train: bool) -> Tensor:
    return dropout(input, p, train)


def _torch_dropout_(input: Tensor, p: float, train: bool) -> Tensor:
    return dropout(input, p, train, inplace=True)


def _require_order(call: OpCall, drawn: Any) -> None:
    """Refuse what one device draws in an order of its own: on CPU, in pairs where memory has gaps.

    Raises:
        UnsupportedError: on every rank, before anything is drawn.
    """
    target: Any = call.operands[0]
    if (
        isinstance(drawn, vescale_rng.Normal)
        and target.device.type == "cpu"
        and target.numel() * (1 + target.is_complex()) >= _BLOCK
        and target._spec.has_gaps
    ):
        raise UnsupportedError(
            f"normal_ of a view of shape {tuple(target.shape)} with gaps in memory, as of every "
            "second row: on one device torch draws it in another order than a tensor of its own, "
            "which is not known over ranks. Draw a tensor of its own and copy it: "
            "x[::2] = torch.randn_like(x[::2]), on one device as well where both are compared."
        )


def _number(value: Any) -> Any:
    """A parameter; torch takes a truth value for a number, vescale_rng does not."""
    return int(value) if isinstance(value, bool) else value


def _filler(distribution: Any) -> Rule:
    """An in-place op that fills with draws of `distribution(*args, **kwargs)`."""

    @nothing_on_meta
    def local(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
        own = {key: _number(value) for key, value in kwargs.items()}
        generator = own.pop("generator", None)
        drawn = distribution(*map(_number, args[1:]), **own)
        _require_order(context.call, drawn)
        forget(args[0])
        with torch.no_grad():
            # Drawn by global index, into the memory of the shard: views of it see the numbers.
            filled: Tensor = vescale_rng.fill_(
                args[0],
                drawn,
                draw_layout(context, args[0], generator),
                generator=generator,
            )
        return filled

    def strategy(call: OpCall) -> Strategy | None:
        if len(call.operands) != 1:
            return None  # a parameter is a tensor: it may differ per element
        dims = letters(call.operands[0].ndim)
        return Signature((dims,), (dims,), elementwise=True, local=local).strategy()

    # Parameters of the distribution are no part of the plan's key: new ones need no new plan.
    return Rule("random in place", strategy, Reads.NOTHING, writes=0)


def _bernoulli_strategy(call: OpCall) -> Strategy | None:
    """With one probability, or with a tensor of them that broadcasts."""
    if len(call.operands) == 1:
        return _ONE_PROBABILITY.strategy(call)
    inputs, output = broadcast_letters(call.shapes())
    # The target itself must not be broadcast.
    if len(output) != call.operands[0].ndim or None in inputs[0]:
        return None
    signature = Signature(inputs, (inputs[0],), elementwise=True, local=bernoulli_each_)
    return signature.strategy()


def _uniform(from_: float = 0.0, to: float = 1.0, **named: float) -> Any:
    return vescale_rng.Uniform(named.get("from", from_), to)


def _random(*bounds: int | None, to: int | None = None, **named: int) -> Any:
    """`random_()`, `random_(to)` and `random_(from, to)`, where `to` may be None."""
    if not bounds and to is None and not named:
        return vescale_rng.Random()
    if len(bounds) == 1 and to is None:  # `random_(to)`: a single bound is the upper one
        bounds = (0, *bounds)
    low = bounds[0] if bounds else named.get("from", 0)
    return vescale_rng.RandInt(low or 0, bounds[1] if len(bounds) > 1 else to)


_ONE_PROBABILITY = _filler(lambda p=0.5: vescale_rng.Bernoulli(p))


RULES = {
    torch.Tensor.uniform_: _filler(_uniform),
    torch.Tensor.normal_: _filler(lambda mean=0.0, std=1.0: vescale_rng.Normal(mean, std)),
    torch.Tensor.bernoulli_: Rule("random in place", _bernoulli_strategy, Reads.SHAPES, writes=0),
    torch.Tensor.log_normal_: _filler(lambda mean=1.0, std=2.0: vescale_rng.LogNormal(mean, std)),
    torch.Tensor.exponential_: _filler(lambda lambd=1.0: vescale_rng.Exponential(lambd)),
    torch.Tensor.geometric_: _filler(lambda p: vescale_rng.Geometric(p)),
    torch.Tensor.cauchy_: _filler(lambda median=0.0, sigma=1.0: vescale_rng.Cauchy(median, sigma)),
    torch.Tensor.random_: _filler(_random),
}

HANDLERS = {
    F.dropout: dropout,
    torch.dropout: _torch_dropout,
    torch.dropout_: _torch_dropout_,
}
