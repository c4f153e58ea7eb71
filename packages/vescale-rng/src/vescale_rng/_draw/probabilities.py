"""Draws whose parameters are tensors: a probability, a mean or a deviation for every element."""

from dataclasses import dataclass
from typing import Any

import torch

from vescale_rng import _portable as portable
from vescale_rng._arguments import EACH, checked
from vescale_rng._cpu.fill import Parameter, fill_with_parameter
from vescale_rng._cpu.samplers import SerialOp
from vescale_rng._cpu.stream_ops import words_of_bernoulli
from vescale_rng._cuda.bernoulli import fill_each_cuda
from vescale_rng._distributions import Bernoulli, Distribution, Normal
from vescale_rng._draw.devices import check_device, cpu_generator, cuda_generator, is_cuda
from vescale_rng._draw.fill import fill_, write_target
from vescale_rng._errors import DistributionError, LayoutError
from vescale_rng._layout.fill_plan import FillPlan, plan_for
from vescale_rng._layout.layout import LayoutLike, ShardLayout, as_layout
from vescale_rng._layout.local_like import make_like, make_new
from vescale_rng._layout.of_tensor import layout_of_tensor, local_of
from vescale_rng._policy import policy


@checked(p=EACH)
def bernoulli_(
    local: torch.Tensor,
    p: float | torch.Tensor,
    layout: LayoutLike | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw `Tensor.bernoulli_` of the global tensor, with one probability or one for every element.

    Args:
        local: this rank's elements, on CPU; zeros and ones are written to it.
        p: a number, or this rank's part of the tensor of probabilities, which broadcasts to
            `local`.
        layout: which elements of the global tensor `local` holds; None asks `local` itself.
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Returns:
        `local`.

    Raises:
        LayoutError: the layout contradicts itself, or p does not broadcast to `local`.
        DistributionError: torch does not draw this for these dtypes, or p is no probability. Of a
            tensor p only this rank's part is seen: one that is wrong elsewhere is an error there.
        DeviceError: the tensor or the generator is not on CPU.
    """
    if not isinstance(p, torch.Tensor):
        return fill_(local, Bernoulli(float(p)), layout, generator)
    if layout is None:
        layout = layout_of_tensor(local)
    target = local_of(local)
    if is_cuda(target):
        _each_on_cuda(target, local_of(p).detach(), as_layout(layout), generator)
        return local
    check_device(target)
    check_device(local_of(p), "p")
    generator = cpu_generator(generator)
    plan = plan_for(as_layout(layout), target)
    # Before a rank without elements returns: all ranks refuse what torch refuses.
    words = words_of_bernoulli(target.dtype, p.dtype)
    values = _spread(local_of(p).detach(), target)
    if not plan.numel:
        return local
    if policy() == "portable":
        key = portable.draw_key(generator, target.device)
        portable.bernoulli_of(write_target(target), values, plan.layout, key)
    else:
        _draw(plan, words, values, write_target(target), generator)
    return local


@checked()
def bernoulli(
    input: torch.Tensor,
    layout: LayoutLike | None = None,
    generator: torch.Generator | None = None,
    *,
    p: float | None = None,
) -> torch.Tensor:
    """Draw `torch.bernoulli` of the global tensor: new zeros and ones, of the dtype of `input`.

    Args:
        input: this rank's part of the probabilities; with a `p`, of any tensor of that shape.
        layout: which elements `input` holds; None asks `input` itself.
        generator: a CPU generator, in the same state on every rank; None is torch's default.
        p: one probability in place of the elements of `input`: `torch.bernoulli(input, p)`.

    Raises:
        LayoutError: the layout contradicts itself or does not cover `input`.
        DistributionError: a probability of this rank is none, or the dtype has none.
        DeviceError: the tensor or the generator is not on CPU.
    """
    held = as_layout(layout_of_tensor(input) if layout is None else layout)
    source = local_of(input)
    if not is_cuda(source):
        check_device(source, "input")
    plan_for(held, source)
    # torch's result is row-major, whatever the memory order of the input.
    result, where = make_like(source, held, row_major=True)
    if p is not None:
        # torch has no derivative of this form, so the result has no graph here.
        return bernoulli_(result, p, where, generator)
    return _drawn_from(bernoulli_(result, source, where, generator), source)


@checked(mean=EACH, std=EACH)
def normal(
    mean: torch.Tensor | float,
    std: torch.Tensor | float,
    layout: LayoutLike,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw `torch.normal` of the global tensor, of which at least one parameter is a tensor.

    Args:
        mean: a number, or this rank's part of the means.
        std: a number, or this rank's part of the deviations.
        layout: which elements of the global result this rank gets: those of the parameters,
            broadcast against each other.
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Returns:
        This rank's part of the result: row-major, of the dtype of `mean` if that is a tensor,
        else of `std`.

    Raises:
        LayoutError: the layout does not cover the broadcast parameters.
        DistributionError: a deviation of this rank is negative, the dtype is not floating point,
            or neither parameter is a tensor.
        DeviceError: a tensor or the generator is not on CPU.
    """
    named = {"mean": mean, "std": std}
    tensors = [x for x in named.values() if isinstance(x, torch.Tensor)]
    if not tensors:
        raise DistributionError(
            f"normal takes a tensor for `mean` or `std`, got {mean=} and {std=}; with two "
            "numbers use fill_(local, Normal(mean, std), layout)"
        )
    for name, tensor in named.items():
        if isinstance(tensor, torch.Tensor) and not is_cuda(tensor):
            check_device(tensor, name)
    # Not by `< 0`: a NaN is refused as well, as torch refuses it.
    if isinstance(std, torch.Tensor) and std.numel() and not bool(std.min() >= 0):
        raise DistributionError("normal takes deviations of at least 0, found a smaller one")
    shape = torch.broadcast_tensors(*tensors)[0].shape  # type: ignore[no-untyped-call]
    result, held = make_new(shape, as_layout(layout), tensors[0].dtype, tensors[0].device)
    # The same torch ops as in ATen/native/DistributionTemplates.h, so the same bits.
    if isinstance(std, torch.Tensor):
        fill_(result, Normal(0.0, 1.0), held, generator).mul_(std.detach())
    else:
        fill_(result, Normal(0.0, std), held, generator)
    if not isinstance(mean, torch.Tensor):
        # As torch does: a number would not be rounded to the dtype before it is added.
        mean = torch.full((), mean, dtype=result.dtype, device=result.device)
    return _drawn_from(result.add_(mean.detach()), *tensors)


def _drawn_from(drawn: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    """Show a draw to autograd as torch does: made of its parameters, with gradients of zero."""
    if not torch.is_grad_enabled() or not any(p.requires_grad for p in parameters):
        return drawn
    result: torch.Tensor = _DrawFunction.apply(drawn, *parameters)  # type: ignore[no-untyped-call]
    return result


class _DrawFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, drawn: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = [(p.shape, p.dtype, p.device) for p in parameters]
        return drawn.view_as(drawn)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        zeros = [torch.zeros(s, dtype=t, device=d) for s, t, d in ctx.parameters]
        return (None, *zeros)


def _each_on_cuda(
    target: torch.Tensor, p: torch.Tensor, layout: ShardLayout, generator: torch.Generator | None
) -> None:
    plan = plan_for(layout, target)
    values = _spread(p, target)
    if plan.numel:
        fill_each_cuda(plan, values, write_target(target), cuda_generator(target, generator))


def _spread(p: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Spread the probabilities: one for each element of `target`, with its strides."""
    try:
        broadcast = p.broadcast_to(target.shape)
    except RuntimeError as error:
        raise LayoutError(
            f"probabilities of shape {tuple(p.shape)} do not broadcast to the local tensor of "
            f"shape {tuple(target.shape)}"
        ) from error
    # Not by min and max: they are no numbers where something is NaN, and this is an error too.
    if not bool(((broadcast >= 0) & (broadcast <= 1)).all()):
        raise DistributionError("bernoulli_ takes probabilities between 0 and 1, found another")
    if broadcast.stride() == target.stride():
        return broadcast
    spread = torch.empty_strided(target.shape, target.stride(), dtype=p.dtype, device=p.device)
    return spread.copy_(broadcast)


@dataclass(frozen=True, eq=False)
class _Each(Distribution):
    """`bernoulli_` with the probabilities in a parameter's scratch."""

    parameter: Parameter

    def draw(self, out: torch.Tensor, generator: torch.Generator | None) -> None:
        """See `Distribution.draw`."""
        out.bernoulli_(self.parameter.of(out.numel()), generator=generator)


def _draw(
    plan: FillPlan, words: int, p: torch.Tensor, local: torch.Tensor, generator: torch.Generator
) -> None:
    # Numbers of elements that other ranks hold are drawn and dropped: any probability serves.
    parameter = Parameter(p, plan.longest, filler=0.5)
    fill_with_parameter(
        plan,
        SerialOp(_Each(parameter), plan.numel, local.dtype, generator),
        words,
        parameter,
        local,
    )
