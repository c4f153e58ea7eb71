"""The relatives of dropout: those that keep mean and variance, and those that drop features."""

from math import sqrt
from typing import NamedTuple

import torch

from vescale_rng._arguments import FLOATS, checked
from vescale_rng._cuda.generator_state import GraphGenerator
from vescale_rng._distributions import Bernoulli
from vescale_rng._draw.dropout import check_dropout
from vescale_rng._draw.fill import fill_
from vescale_rng._errors import DistributionError
from vescale_rng._layout.feature_layout import features_of
from vescale_rng._layout.layout import LayoutLike, ShardLayout
from vescale_rng._layout.local_like import is_one_box, make_like

# -scale * alpha of `selu`: what a dropped element becomes (ATen/native/Dropout.cpp).
_ALPHA = 1.7580993408473766


@checked(local=FLOATS)
def alpha_dropout(
    local: torch.Tensor,
    p: float,
    layout: LayoutLike,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Compute this rank's part of `F.alpha_dropout(x, p, training=True)` of the global x.

    Args:
        local: this rank's elements, on CPU, floating point.
        p: probability of an element to be dropped.
        layout: which elements of the global tensor `local` holds.
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Raises:
        LayoutError: the layout contradicts itself or does not cover `local`.
        DistributionError: p is no probability, or the dtype is not floating point.
        DeviceError: the tensor or the generator is not on CPU.
    """
    call = _check("alpha_dropout", local, p, layout, generator)
    p = call.p
    if not call.draws:
        return torch.alpha_dropout(local, p, True)
    noise, held = make_like(local, call.layout)
    return _alpha(local, fill_(noise, Bernoulli(1 - p), held, call.generator), p)


@checked(local=FLOATS)
def feature_dropout(
    local: torch.Tensor,
    p: float,
    layout: LayoutLike,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Compute `torch.feature_dropout(x, p, True)`, which `F.dropout1d` to `dropout3d` call.

    One number decides on all of x[n, c], wherever its elements are.

    Args:
        local: this rank's elements, on CPU, floating point, of at least two dims.
        p: probability of a feature to be zeroed.
        layout: which elements of the global tensor `local` holds.
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Raises:
        LayoutError: the layout contradicts itself or does not cover `local`.
        DistributionError: p is no probability, the dtype is not floating point, or a dim is
            missing.
        DeviceError: the tensor or the generator is not on CPU.
    """
    call = _check("feature_dropout", local, p, layout, generator)
    p = call.p
    if not call.draws:
        return torch.feature_dropout(local, p, True)
    return local * _feature_noise(local, p, call).div_(1 - p)


@checked(local=FLOATS)
def feature_alpha_dropout(
    local: torch.Tensor,
    p: float,
    layout: LayoutLike,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Compute `F.feature_alpha_dropout(x, p, training=True)`: see `feature_dropout`.

    Args:
        local: this rank's elements, on CPU, floating point, of at least two dims.
        p: probability of a feature to be dropped.
        layout: which elements of the global tensor `local` holds.
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Raises:
        LayoutError: the layout contradicts itself or does not cover `local`.
        DistributionError: p is no probability, the dtype is not floating point, or a dim is
            missing.
        DeviceError: the tensor or the generator is not on CPU.
    """
    call = _check("feature_alpha_dropout", local, p, layout, generator)
    p = call.p
    if not call.draws:
        return torch.feature_alpha_dropout(local, p, True)
    return _alpha(local, _feature_noise(local, p, call), p)


class _Call(NamedTuple):
    layout: ShardLayout
    generator: torch.Generator | GraphGenerator | None
    draws: bool
    p: float


def _check(
    what: str,
    local: torch.Tensor,
    p: float,
    layout: LayoutLike,
    generator: torch.Generator | None,
) -> _Call:
    held, chosen = check_dropout(what, local, p, layout, generator)
    if "feature" in what and len(held.global_shape) < 2:
        raise DistributionError(f"{what} takes at least two dims, got shape {held.global_shape}")
    # torch draws nothing at the ends: it does the same for a shard as for the global tensor.
    return _Call(held, chosen, p not in (0, 1) and 0 not in held.global_shape, float(p))


def _alpha(local: torch.Tensor, noise: torch.Tensor, p: float) -> torch.Tensor:
    # The same torch ops as in ATen/native/Dropout.cpp, so the same bits.
    a = 1.0 / sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
    b = noise.add(-1).mul_(_ALPHA * a).add_(_ALPHA * a * p)
    return (local * noise.mul_(a)).add_(b)


def _feature_noise(local: torch.Tensor, p: float, call: _Call) -> torch.Tensor:
    """Draw the noise of every feature, in a shape that multiplies `local`."""
    features = features_of(call.layout)
    noise = torch.empty(features.shape, dtype=local.dtype, device=local.device)
    fill_(noise, Bernoulli(1 - p), features.layout, call.generator)
    ones = (1,) * (len(call.layout.global_shape) - 2)
    if is_one_box(local, call.layout):
        return noise.reshape(*noise.shape, *ones)
    full, held = make_like(local, call.layout)
    # Several boxes: each takes its features out of the packed noise, spread over the rest.
    for box, (rows, columns) in zip(held.boxes, features.places, strict=True):
        view = full.as_strided(box.shape, box.local_strides, box.local_offset)
        view.copy_(noise[rows, columns].reshape(*box.shape[:2], *ones))
    return full
