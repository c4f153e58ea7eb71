"""Draws with tensors as parameters, samples of categories, and draws that run replicated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import vescale_rng
from torch import Tensor

from vescale_dtensor._layout.execution_events import generator_in, record_draw
from vescale_dtensor._layout.rng_layout import random_layout
from vescale_dtensor._ops.common.functions import by_name, entries
from vescale_dtensor._ops.common.letters import broadcast_letters, letters
from vescale_dtensor._ops.random.on_meta import nothing_on_meta
from vescale_dtensor._planning import LocalContext, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._planning.plan import function_name


def draw_layout(
    context: LocalContext, local: Tensor, generator: torch.Generator | None = None
) -> vescale_rng.ShardLayout:
    """The layout by which this rank draws its shard of operand 0: see `random_layout`."""
    shape = tuple(context.call.operands[0].shape)
    return random_layout(context.input_layout(0), shape, local, generator)


def unexpanded(local: Tensor) -> Tensor:
    """A local tensor whose elements have distinct memory: each gets a draw of its own."""
    return local.contiguous() if 0 in local.stride() else local


def forget(target: Tensor) -> None:
    """Record, if autograd does, that nothing is left of a tensor that draws are written to.

    Its old values get no gradient, and a leaf is refused, as on one device.
    """
    if target.requires_grad:
        target.zero_()


# --- One probability, mean or deviation for each element


@nothing_on_meta
def bernoulli_each_(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    """`Tensor.bernoulli_(p)` with a tensor of probabilities, on the locals."""
    p = args[1] if len(args) > 1 else kwargs["p"]
    forget(args[0])
    with torch.no_grad():
        filled: Tensor = vescale_rng.bernoulli_(
            args[0],
            p,
            draw_layout(context, args[0], kwargs.get("generator")),
            kwargs.get("generator"),
        )
    return filled


@nothing_on_meta
def _bernoulli(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    p = args[1] if len(args) > 1 else kwargs.get("p")
    local = unexpanded(args[0])
    generator = kwargs.get("generator")
    layout = draw_layout(context, local, generator)
    # One number per global element: a shard takes those of its own indices, without communication.
    drawn = vescale_rng.bernoulli(local, layout, generator, p=p)
    return drawn.contiguous()


def _bernoulli_strategy(call: OpCall) -> Strategy | None:
    if len(call.operands) != 1 or not _is_positional(call):
        return None
    if call.differentiable and (len(call.args) > 1 or "p" in call.kwargs):
        return None  # torch records a node that has no derivative; the fallback makes the same
    dims = letters(call.operands[0].ndim)
    return _row_major(Signature((dims,), (dims,), elementwise=True, local=_bernoulli))


@nothing_on_meta
def _normal(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    mean = args[0] if args else kwargs["mean"]
    std = args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    tensors = [x for x in (mean, std) if isinstance(x, Tensor)]
    example = torch.empty(
        torch.broadcast_shapes(*(t.shape for t in tensors)),  # type: ignore[no-untyped-call]
        device="meta",
    )
    shape = torch.broadcast_shapes(*context.call.shapes())  # type: ignore[no-untyped-call]
    generator = kwargs.get("generator")
    rng_layout = random_layout(context.output_layout(), tuple(shape), example, generator)
    return vescale_rng.normal(mean, std, rng_layout, generator)


def _normal_strategy(call: OpCall) -> Strategy | None:
    if "out" in call.kwargs or "size" in call.kwargs or len(call.args) > 2:
        return None
    inputs, output = broadcast_letters(call.shapes())
    return _row_major(Signature(inputs, (output,), local=_normal))


def _row_major(signature: Signature) -> Strategy:
    """Results that are row-major in torch, whatever the memory order of the parameters."""
    return replace(signature, output_orders=(None,)).strategy()


def _is_positional(call: OpCall) -> bool:
    """Whether the tensor is given by position, and no `out`."""
    return bool(call.args) and "out" not in call.kwargs


# --- Samples of rows


@nothing_on_meta
def _multinomial(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    local = unexpanded(args[0])
    own = by_name(("num_samples", "replacement"), args[1:], kwargs)
    rng_layout = draw_layout(context, local, own.get("generator"))
    return vescale_rng.multinomial(local, **own, layout=rng_layout)


def _multinomial_strategy(call: OpCall) -> Strategy | None:
    ndim = call.operands[0].ndim
    if ndim not in (1, 2) or not _is_positional(call) or 0 in call.operands[0].shape:
        return None
    dims = letters(ndim)
    # A sample is drawn from all categories of its row.
    fixed = frozenset({ndim - 1})
    return _row_major(
        Signature((dims,), ((*dims[:-1], None),), unshardable=fixed, local=_multinomial)
    )


# --- Draws whose values decide how many random numbers they use


def _replicated(call: OpCall) -> Strategy | None:
    ndims = {operand.ndim for operand in call.operands}
    if len(ndims) != 1 or "out" in call.kwargs:
        return None
    dims = tuple(range(ndims.pop()))
    # How many numbers an element takes depends on its value, so no rank knows where its own begin.
    inputs, fixed = (dims,) * len(call.operands), frozenset(dims)
    return _row_major(Signature(inputs, (dims,), unshardable=fixed, local=_drawn_alike))


@nothing_on_meta
def _drawn_alike(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    """Every rank draws all of it, which is the same where generators are: they are compared."""
    record_draw(context.input_layout(0).mesh, args[0], generator_in(args, kwargs))
    with vescale_rng.no_native_draws(function_name(context.call.func)):
        return context.call.func(*args, **kwargs)  # type: ignore[no-any-return]


def _rrelu(call: OpCall) -> Strategy | None:
    if call.argument(3, "training", False):
        return _replicated(call)
    dims = letters(call.operands[0].ndim)
    return _row_major(Signature((dims,), (dims,), elementwise=True))


_READS = Reads.NUMBERS | Reads.SHAPES
RULES: dict[Any, Rule] = {
    **entries("bernoulli", Rule("bernoulli", _bernoulli_strategy)),
    **entries("normal", Rule("normal", _normal_strategy, Reads.SHAPES)),
    **entries("multinomial", Rule("multinomial", _multinomial_strategy, _READS)),
    **entries("poisson binomial", Rule("drawn replicated", _replicated)),
    **entries("rrelu", Rule("rrelu", _rrelu)),
}
