"""What each random op of ATen does on torch's DTensors: this rank's part, without private names.

The functions take an op and its arguments by name, with `input` for `self` and `low` for
`from`. They run below autograd, as kernels do.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale_rng._draw.dropout import native_dropout
from vescale_rng._draw.fill import fill_
from vescale_rng._draw.probabilities import bernoulli, bernoulli_, normal
from vescale_rng._draw.sampling import multinomial
from vescale_rng._errors import LayoutError
from vescale_rng._layout.layout import Layout, dense_strides
from vescale_rng._layout.local_like import make_like
from vescale_rng._layout.of_tensor import layout_of_tensor
from vescale_rng.distributions import (
    Bernoulli,
    Cauchy,
    Distribution,
    Exponential,
    Geometric,
    LogNormal,
    Normal,
    RandInt,
    Random,
    Uniform,
)

Generator = torch.Generator | None


def _held(op: Any, tensor: DTensor) -> Layout:
    if any(placement.is_partial() for placement in tensor.placements):
        raise LayoutError(
            f"{op} on a DTensor placed as {tensor.placements}: its local tensors are terms of a "
            "sum, not elements. Redistribute it to Replicate() or Shard() first"
        )
    return layout_of_tensor(tensor)


def _wrapped(local: torch.Tensor, like: DTensor, shape: Any, order: Any = None) -> DTensor:
    strides = dense_strides(shape, order)
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )


def _filling(make: Callable[..., Distribution]) -> Callable[..., DTensor]:
    """Make an op that fills its input with draws of `make(**its other arguments)`."""

    def run(op: Any, input: DTensor, generator: Generator = None, **kwargs: Any) -> DTensor:
        held = _held(op, input)
        fill_(input.to_local(), make(**kwargs), held, generator)
        return input

    return run


def _like(make: Callable[..., Distribution]) -> Callable[..., DTensor]:
    """Make a factory of tensors like its input, filled with draws of `make(low=, high=)`."""

    def run(
        op: Any,
        input: DTensor,
        generator: Generator = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        low: int = 0,
        high: int | None = None,
        **_: Any,
    ) -> DTensor:
        row_major = memory_format is torch.contiguous_format
        local, held = make_like(input.to_local(), _held(op, input), dtype, row_major=row_major)
        fill_(local, make(low, high), held, generator)
        return _wrapped(local, input, held.global_shape, held.memory_order)

    return run


def _native_dropout(
    op: Any, input: DTensor, p: float, train: bool | None
) -> tuple[DTensor, DTensor]:
    held = _held(op, input)
    # torch's own modules say True or False; the rounding of None is another.
    results = native_dropout(input.to_local(), p, train is not False, held)
    result, mask = (_wrapped(r, input, held.global_shape, held.memory_order) for r in results)
    return result, mask


def _bernoulli_each_(op: Any, input: DTensor, p: Any, generator: Generator = None) -> DTensor:
    held = _held(op, input)
    bernoulli_(input.to_local(), _placed_like(op, p, input), held, generator)
    return input


def _bernoulli(op: Any, input: DTensor, p: Any = None, generator: Generator = None) -> DTensor:
    held = _held(op, input)
    if isinstance(p, torch.Tensor):
        new, where = make_like(input.to_local(), held, row_major=True)
        local = bernoulli_(new, _placed_like(op, p, input), where, generator)
    else:
        local = bernoulli(input.to_local(), held, generator, p=p)
    return _wrapped(local, input, held.global_shape)


def _normal(op: Any, mean: Any, std: Any, generator: Generator = None) -> DTensor:
    shaped: Any = mean if isinstance(mean, torch.Tensor) else std
    held = _held(op, shaped)
    parts = [_placed_like(op, x, shaped) if isinstance(x, torch.Tensor) else x for x in (mean, std)]
    return _wrapped(normal(parts[0], parts[1], held, generator), shaped, held.global_shape)


def _placed_like(op: Any, tensor: torch.Tensor, example: DTensor) -> torch.Tensor:
    """Return the local part of a parameter, for the elements of `example` that are here."""
    if tensor.ndim == 0:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if not isinstance(tensor, DTensor) or tensor.shape != example.shape:
        raise LayoutError(
            f"{op} takes parameters that are DTensors of the shape {tuple(example.shape)}, got a "
            f"{type(tensor).__name__} of shape {tuple(tensor.shape)}: distribute and expand it"
        )
    if tensor.placements == example.placements:
        return tensor.to_local()
    return tensor.redistribute(example.device_mesh, example.placements).to_local()


def _multinomial(
    op: Any,
    input: DTensor,
    num_samples: int,
    replacement: bool = False,
    generator: Generator = None,
) -> DTensor:
    # Rows have to be whole, and no terms of a sum.
    cut = [p.is_partial() or p.is_shard(input.ndim - 1) for p in input.placements]
    placements = [Replicate() if bad else p for p, bad in zip(input.placements, cut, strict=True)]
    rows = input.redistribute(placements=placements) if any(cut) else input
    held = _held(op, rows)
    local = multinomial(rows.to_local(), num_samples, replacement, layout=held, generator=generator)
    return _wrapped(local, rows, (*held.global_shape[:-1], num_samples))


def _gathered(op: Any, **kwargs: Any) -> DTensor:
    """Run an op whose values decide how far it goes on whole tensors, on every rank."""
    example = next(x for x in kwargs.values() if isinstance(x, DTensor))
    names = {"input": "self", "low": "from"}
    whole = {
        names.get(name, name): x.full_tensor() if isinstance(x, DTensor) else x
        for name, x in kwargs.items()
    }
    result = op(**whole)
    whole_result = DTensor.from_local(
        result, example.device_mesh, [Replicate()] * example.device_mesh.ndim, run_check=False
    )
    wanted = [p if isinstance(p, Shard) else Replicate() for p in example.placements]
    return whole_result.redistribute(placements=wanted)


def _rrelu(
    op: Any, input: DTensor, noise: DTensor, lower: float, upper: float, **rest: Any
) -> DTensor:
    if not rest["training"]:
        # What torch does then, and what has a rule of its own.
        evaluated: Any = torch.nn.functional.leaky_relu(input, (lower + upper) / 2)
        return evaluated  # type: ignore[no-any-return]
    slopes = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    result = _gathered(op, input=input, noise=slopes, lower=lower, upper=upper, **rest)
    _cut_into(noise, slopes)
    return result


def _cut_into(piece: DTensor, whole: torch.Tensor) -> None:
    """Write a whole tensor's elements into the local part of a DTensor."""
    local = piece.to_local()
    for box in layout_of_tensor(piece).boxes:
        start = local.storage_offset() + box.local_offset
        sides = zip(box.global_offset, box.shape, strict=True)
        part = whole[tuple(slice(low, low + extent) for low, extent in sides)]
        local.as_strided(box.shape, box.local_strides, start).copy_(part)


def _random(low: int | None = None, to: int | None = None) -> Distribution:
    if low is None and to is None:
        return Random()
    return RandInt(low or 0, to)


HANDLERS: dict[str, Callable[..., Any]] = {
    "uniform_.default": _filling(lambda low, to: Uniform(low, to)),
    "normal_.default": _filling(lambda mean, std: Normal(mean, std)),
    "log_normal_.default": _filling(lambda mean, std: LogNormal(mean, std)),
    "exponential_.default": _filling(lambda lambd: Exponential(lambd)),
    "geometric_.default": _filling(lambda p: Geometric(p)),
    "cauchy_.default": _filling(lambda median, sigma: Cauchy(median, sigma)),
    "bernoulli_.float": _filling(lambda p: Bernoulli(p)),
    "random_.default": _filling(_random),
    "random_.to": _filling(_random),
    "random_.from": _filling(_random),
    "bernoulli_.Tensor": _bernoulli_each_,
    "bernoulli.default": _bernoulli,
    "bernoulli.p": _bernoulli,
    "bernoulli.Tensor": _bernoulli,
    "rand_like.default": _like(lambda low, high: Uniform()),
    "rand_like.generator": _like(lambda low, high: Uniform()),
    "randn_like.default": _like(lambda low, high: Normal()),
    "randn_like.generator": _like(lambda low, high: Normal()),
    "randint_like.default": _like(RandInt),
    "randint_like.generator": _like(RandInt),
    "randint_like.low_dtype": _like(RandInt),
    "randint_like.low_generator_dtype": _like(RandInt),
    "native_dropout.default": _native_dropout,
    "normal.Tensor_float": _normal,
    "normal.float_Tensor": _normal,
    "normal.Tensor_Tensor": _normal,
    "multinomial.default": _multinomial,
    "poisson.default": _gathered,
    "binomial.default": _gathered,
    "rrelu_with_noise.default": _rrelu,
}
