"""Dropout of a shard of a tensor, with the mask that one device would have drawn."""

from collections.abc import Callable
from functools import cache
from numbers import Real
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_unary

from vescale_rng._arguments import FLOATS, checked
from vescale_rng._cpu.fill import ways_around
from vescale_rng._cpu.stream import advance
from vescale_rng._cuda import dropout as cuda_dropout
from vescale_rng._cuda.generator_state import GraphGenerator
from vescale_rng._distributions import Bernoulli
from vescale_rng._draw.devices import check_device, cpu_generator, cuda_generator, is_cuda
from vescale_rng._draw.fill import fill_
from vescale_rng._errors import DistributionError
from vescale_rng._layout.fill_plan import plan_for
from vescale_rng._layout.layout import LayoutLike, ShardLayout, as_layout
from vescale_rng._layout.local_like import make_like
from vescale_rng._policy import policy

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def dropout(
    local: torch.Tensor,
    p: float,
    layout: LayoutLike,
    generator: torch.Generator | GraphGenerator | None = None,
) -> torch.Tensor:
    """Compute this rank's part of `F.dropout(x, p, training=True)` of the global x.

    Forward and backward give the bits that one device gives, and `generator` ends where one
    device leaves it, on every rank. Differentiable any number of times.

    Args:
        local: this rank's elements, on CPU or CUDA, floating point.
        p: probability of an element to be zeroed.
        layout: which elements of the global tensor `local` holds; kept and passed again, it is
            not checked again.
        generator: of the device of `local`, in the same state on every rank; None is torch's
            default. On CUDA also a `GraphGenerator`.

    Raises:
        LayoutError: the layout contradicts itself or does not cover `local`.
        DistributionError: p is no probability, or the dtype is not floating point.
        DeviceError: the generator is of another device.
    """
    # First of all: a layer calls it thousands of times with equal arguments, and looking at each of
    # them takes as long as drawing. What is remembered was looked at when it was. `_key` is
    # written out.
    if (
        generator is None
        and type(layout) is ShardLayout
        and type(local) in _TENSORS
        and local.is_cpu
    ):
        ways = layout.known((dropout, p, type(p), local.shape, local.stride(), local.dtype))
        if ways is not None and policy() == "native" and not has_torch_function_unary(None):
            return local * _drawn_like(local, 1 - p, *ways).div_(1 - p)
    return _dropout(local, p, layout, generator)


def _key(local: torch.Tensor, p: float) -> tuple[object, ...]:
    # With the type: True is 1, and no probability.
    return (dropout, p, type(p), local.shape, local.stride(), local.dtype)


@checked(local=FLOATS)
def _dropout(
    local: torch.Tensor,
    p: float,
    layout: LayoutLike,
    generator: torch.Generator | GraphGenerator | None = None,
) -> torch.Tensor:
    layout, generator = check_dropout("dropout", local, p, layout, generator)
    p = float(p)  # as torch takes it: numpy's float16 would round 1 - p
    # p = 1 is a product with a zero in torch (NaN stays NaN), so it is asked as well.
    if p in (0, 1) or 0 in layout.global_shape:
        # torch draws nothing here: it does the same for a shard as for the global tensor.
        return functional.dropout(local, p, training=True)
    if is_cuda(local):
        if has_torch_function_unary(None):  # as in `fill_`: a mode sees the kernel as one function
            seen: torch.Tensor = handle_torch_function(dropout, (), local, p, layout, generator)
            return seen
        return cuda_dropout.dropout(local, p, layout, generator)[0]
    # The same torch ops as in ATen/native/Dropout.cpp, so the same bits.
    noise, held = make_like(local, layout)
    kept = Bernoulli(1 - p)
    fill_(noise, kept, held, generator)
    if policy() == "native" and noise.stride() == local.stride():
        ways = ways_around(plan_for(held, noise), kept, noise)
        # Nothing to remember where the noise had to go through scratch, or has other strides: the
        # short way above fills a tensor like the input in one call.
        if ways is not None:
            layout.remembered(_key(local, p), lambda: ways)
    return local * noise.div_(1 - p)


def _drawn_like(local: torch.Tensor, p: float, before: int, after: int) -> torch.Tensor:
    """Draw what `fill_` draws, where nothing is left to find out: at half the cost."""
    generator = torch.default_generator
    noise = torch.empty_like(local, requires_grad=False)
    if before:  # 0 on the first rank, and `after` on the last
        advance(before, generator)
    noise.bernoulli_(p, generator=generator)
    if after:
        advance(after, generator)
    return noise


@checked(local=FLOATS)
def native_dropout(
    local: torch.Tensor,
    p: float,
    train: bool,
    layout: LayoutLike,
    generator: torch.Generator | GraphGenerator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute this rank's part of `torch.native_dropout` of the global tensor: result and mask.

    Args:
        local: this rank's elements, on CPU or CUDA, floating point.
        p: probability of an element to be zeroed. Unlike `dropout`, 0 and 1 draw as well.
        train: False copies and draws nothing.
        layout: which elements of the global tensor `local` holds.
        generator: of the device of `local`, in the same state on every rank; None is torch's
            default. On CUDA also a `GraphGenerator`.

    Returns:
        The result, and what was kept of it as booleans.

    Raises:
        LayoutError: the layout contradicts itself or does not cover `local`.
        DistributionError: p is no probability, or the dtype is not floating point.
        DeviceError: the generator is of another device.
    """
    layout, generator = check_dropout("native_dropout", local, p, layout, generator)
    p = float(p)
    if 0 in layout.global_shape:
        # torch gives an empty tensor back itself, and a mask of its dtype.
        return local.clone(), torch.empty_like(local, requires_grad=False)
    if not train:
        return local.clone(), torch.ones_like(local, dtype=torch.bool)
    if is_cuda(local):
        return cuda_dropout.dropout(local, p, layout, generator)
    mask, held = make_like(local, layout, torch.bool)
    fill_(mask, Bernoulli(1 - p), held, generator)
    # torch's own guard against a division by zero.
    scale = 0.0 if p == 1 else 1 / (1 - p)
    kept: torch.Tensor = _NativeDropout.apply(local, mask, scale)  # type: ignore[no-untyped-call]
    return kept, mask


class _NativeDropout(torch.autograd.Function):
    """torch's derivative of `native_dropout`, which rounds otherwise than that of its parts."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return _scaling()(local, mask, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        # An op of torch with a derivative of its own: so there is a second one here as well.
        backward = torch.ops.aten.native_dropout_backward
        return backward(gradients[0], mask, ctx.scale), None, None


def _scale_noise(local: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return local * mask.to(local.dtype).mul_(scale)


def _scale_result(local: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return local.mul(mask).mul_(scale)


@cache
def _scaling() -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]:
    """Find out where the installed torch rounds: it shows in 16 bits."""
    # A few hundred values in 16 bits: some of them lie where the two ways round apart.
    values = torch.linspace(-3, 3, 200, dtype=torch.float16, device="cpu")
    # The mask is random, and so the default generator has to be restored.
    before = torch.get_rng_state()
    expected, mask = torch.native_dropout(values, 0.1, True)
    torch.set_rng_state(before)
    for way in (_scale_noise, _scale_result):
        if torch.equal(way(values, mask, 1 / (1 - 0.1)), expected):
            return way
    raise DistributionError(
        f"torch {torch.__version__} rounds native_dropout in a way that this version of "
        "vescale-rng does not know"
    )


def check_dropout(
    what: str,
    local: torch.Tensor,
    p: float,
    layout: LayoutLike,
    generator: torch.Generator | GraphGenerator | None,
) -> tuple[ShardLayout, torch.Generator | GraphGenerator | None]:
    """Check a dropout's arguments, and return its layout and generator.

    Raises:
        DistributionError: p is no probability, or the dtype is not floating point.
        DeviceError: the generator is of another device.
    """
    if not _is_probability(p):
        raise DistributionError(f"{what} takes a probability between 0 and 1, got p={p!r}")
    if not local.is_floating_point():
        raise DistributionError(f"`local`: {what} takes a floating point tensor, got {local.dtype}")
    if is_cuda(local):
        return as_layout(layout), cuda_generator(local, generator)
    check_device(local)
    return as_layout(layout), cpu_generator(generator)


def _is_probability(p: object) -> bool:
    # First as it mostly is: an abstract class answers at ten times the cost.
    return (type(p) is float or isinstance(p, Real)) and 0 <= float(p) <= 1
