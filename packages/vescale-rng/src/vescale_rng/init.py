"""The random initialisers of `torch.nn.init`, for a shard of a parameter.

Each function fills this rank's part in place with what its namesake writes into the global one, and
leaves the generator where that leaves it. Its arguments are those of torch, and two more: the
`layout` (which elements of the global parameter `local` holds; None asks `local` itself) and
what torch has as well, the `generator` (in the same state on every rank; None is torch's
default). All raise what `vescale_rng.fill_` raises.
"""

from math import prod, sqrt
from typing import Any, Literal

import torch
from torch.nn import init as torch_init

from vescale_rng._arguments import checked
from vescale_rng._distributions import Distribution, Normal, Uniform
from vescale_rng._draw.devices import check_device, cpu_generator
from vescale_rng._draw.fill import fill_
from vescale_rng._draw.truncated_normal import trunc_normal_
from vescale_rng._errors import DistributionError
from vescale_rng._layout.fill_plan import plan_for
from vescale_rng._layout.layout import LayoutLike, ShardLayout, as_layout, whole
from vescale_rng._layout.of_tensor import layout_of_tensor, local_of
from vescale_rng._policy import policy

__all__ = [
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "orthogonal_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
]

Fan = Literal["fan_in", "fan_out"]


@checked()
def uniform_(
    local: torch.Tensor,
    a: float = 0.0,
    b: float = 1.0,
    generator: torch.Generator | None = None,
    *,
    layout: LayoutLike | None = None,
) -> torch.Tensor:
    """Fill `local` as `torch.nn.init.uniform_` fills the global tensor: floats in [a, b)."""
    return _filled(local, Uniform(a, b), layout, generator)


@checked()
def normal_(
    local: torch.Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    generator: torch.Generator | None = None,
    *,
    layout: LayoutLike | None = None,
) -> torch.Tensor:
    """Fill `local` as `torch.nn.init.normal_` fills the global tensor."""
    return _filled(local, Normal(mean, std), layout, generator)


@checked()
def kaiming_uniform_(
    local: torch.Tensor,
    a: float = 0,
    mode: Fan = "fan_in",
    nonlinearity: Any = "leaky_relu",
    generator: torch.Generator | None = None,
    *,
    layout: LayoutLike | None = None,
) -> torch.Tensor:
    """Fill `local` as `torch.nn.init.kaiming_uniform_` does: the fan is that of the global shape.

    Raises:
        DistributionError: torch refuses the shape, the mode or the nonlinearity.
    """
    held = _layout(local, layout)
    if _is_nothing(torch_init.kaiming_uniform_, held, a, mode, nonlinearity):
        return local
    # In the order of torch's own operations: another order rounds otherwise.
    std = torch_init.calculate_gain(nonlinearity, a) / sqrt(_fans(held)[mode == "fan_out"])
    bound = sqrt(3.0) * std
    return _filled(local, Uniform(-bound, bound), held, generator)


@checked()
def kaiming_normal_(
    local: torch.Tensor,
    a: float = 0,
    mode: Fan = "fan_in",
    nonlinearity: Any = "leaky_relu",
    generator: torch.Generator | None = None,
    *,
    layout: LayoutLike | None = None,
) -> torch.Tensor:
    """Fill `local` as `torch.nn.init.kaiming_normal_` does: the fan is that of the global shape.

    Raises:
        DistributionError: torch refuses the shape, the mode or the nonlinearity.
    """
    held = _layout(local, layout)
    if _is_nothing(torch_init.kaiming_normal_, held, a, mode, nonlinearity):
        return local
    std = torch_init.calculate_gain(nonlinearity, a) / sqrt(_fans(held)[mode == "fan_out"])
    return _filled(local, Normal(0.0, std), held, generator)


@checked()
def xavier_uniform_(
    local: torch.Tensor,
    gain: float = 1.0,
    generator: torch.Generator | None = None,
    *,
    layout: LayoutLike | None = None,
) -> torch.Tensor:
    """Fill `local` as `torch.nn.init.xavier_uniform_` does: the fans are those of the global shape.

    Raises:
        DistributionError: torch refuses the shape.
    """
    held = _layout(local, layout)
    # Only for what torch refuses: unlike kaiming's, its xavier does not return early for an empty
    # parameter.
    _is_nothing(torch_init.xavier_uniform_, held, gain)
    # The deviation of a uniform is its bound over sqrt(3), as in torch.
    bound = sqrt(3.0) * _xavier_std(held, gain)
    return _filled(local, Uniform(-bound, bound), held, generator)


@checked()
def xavier_normal_(
    local: torch.Tensor,
    gain: float = 1.0,
    generator: torch.Generator | None = None,
    *,
    layout: LayoutLike | None = None,
) -> torch.Tensor:
    """Fill `local` as `torch.nn.init.xavier_normal_` does: the fans are those of the global shape.

    Raises:
        DistributionError: torch refuses the shape.
    """
    held = _layout(local, layout)
    _is_nothing(torch_init.xavier_normal_, held, gain)
    return _filled(local, Normal(0.0, _xavier_std(held, gain)), held, generator)


@checked()
def orthogonal_(
    local: torch.Tensor,
    gain: float = 1,
    generator: torch.Generator | None = None,
    *,
    layout: LayoutLike | None = None,
) -> torch.Tensor:
    """Fill `local` as `torch.nn.init.orthogonal_` fills the global tensor.

    Every element of the result depends on all the matrix, so each rank draws and factorises all
    of it: time and memory are those of one device. Under the portable policy the matrix is
    that policy's, and its factors are those of the device of `local`.

    Raises:
        DistributionError: torch refuses the shape or the dtype.
    """
    held = _layout(local, layout)
    target = local_of(local)
    check_device(target)
    plan_for(held, target)
    generator = cpu_generator(generator)
    if _is_nothing(torch_init.orthogonal_, held, gain):
        return local
    try:
        factor = _orthogonal(held, target, gain, generator)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise DistributionError(f"orthogonal_ of {target.dtype}: torch says {reason!r}") from error
    with torch.no_grad():
        for box in held.boxes:
            start = target.storage_offset() + box.local_offset
            part = factor[tuple(map(_slice, box.global_offset, box.shape))]
            target.as_strided(box.shape, box.local_strides, start).copy_(part)
    return local


def _orthogonal(
    layout: ShardLayout, target: torch.Tensor, gain: float, generator: torch.Generator
) -> torch.Tensor:
    """Return the (semi) orthogonal matrix of the global shape, made of the policy's normals."""
    if policy() == "native":
        # By torch itself: QR has other signs in other libraries, and the sign is part of the
        # result.
        made = torch.empty(layout.global_shape, dtype=target.dtype, device=target.device)
        filled: torch.Tensor = torch_init.orthogonal_(made, gain, generator)
        return filled
    rows, columns = layout.global_shape[0], prod(layout.global_shape[1:])
    normals = torch.empty(rows, columns, dtype=target.dtype, device=target.device)
    fill_(normals, Normal(), whole((rows, columns)), generator)
    q, r = torch.linalg.qr(normals if rows >= columns else normals.t())
    # With these signs the factors are unique, and q is uniform among orthogonal matrices.
    q = q * r.diagonal().sign()
    factor: torch.Tensor = q if rows >= columns else q.t()
    return factor.mul(gain).reshape(layout.global_shape)


def _slice(start: int, extent: int) -> slice:
    return slice(start, start + extent)


def _filled(
    local: torch.Tensor,
    distribution: Distribution,
    layout: LayoutLike | None,
    generator: torch.Generator | None,
) -> torch.Tensor:
    # As in torch.nn.init: a parameter is a leaf that requires a gradient, and autograd would refuse
    # to have it written.
    with torch.no_grad():
        return fill_(local, distribution, layout, generator)


def _layout(local: torch.Tensor, layout: LayoutLike | None) -> ShardLayout:
    return as_layout(layout_of_tensor(local) if layout is None else layout)


def _is_nothing(func: Any, layout: ShardLayout, *args: Any) -> bool:
    """Tell whether torch does nothing for that shape; what it refuses, it says itself."""
    try:
        # On the meta device nothing is drawn, and the arguments are checked all the same.
        func(torch.empty(layout.global_shape, device="meta"), *args)
    except (ValueError, NotImplementedError) as error:
        raise DistributionError(f"{func.__name__}: {error}") from error
    # Asked of the global shape: a rank without elements has to move its generator like the others.
    return 0 in layout.global_shape


def _fans(layout: ShardLayout) -> tuple[int, int]:
    """Return inputs and outputs of one unit (the fan-in and fan-out of `torch.nn.init`)."""
    # Of the global shape: a shard has fewer inputs, and would be drawn wider.
    field = prod(layout.global_shape[2:])
    return layout.global_shape[1] * field, layout.global_shape[0] * field


def _xavier_std(layout: ShardLayout, gain: float) -> float:
    fan_in, fan_out = _fans(layout)
    return gain * sqrt(2.0 / float(fan_in + fan_out))
