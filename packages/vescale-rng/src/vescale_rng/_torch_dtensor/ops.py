"""Runs each random op of ATen on a part of a tensor: this rank's numbers, no private names.

The functions get a `Placing` (which elements a tensor is), an op, and its arguments by name, with
`input` for `self` and `low` for `from`. Tensors are torch's DTensors or, where the placing knows
plain ones, plain tensors. They run below autograd, as kernels do.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale_rng._distributions import (
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
from vescale_rng._draw.dropout import dropout, native_dropout
from vescale_rng._draw.dropout_family import (
    alpha_dropout,
    feature_alpha_dropout,
    feature_dropout,
)
from vescale_rng._draw.fill import fill_
from vescale_rng._draw.probabilities import bernoulli, bernoulli_, normal
from vescale_rng._draw.sampling import multinomial
from vescale_rng._errors import LayoutError
from vescale_rng._layout.layout import ShardLayout, dense_strides
from vescale_rng._layout.local_like import make_like
from vescale_rng._layout.of_tensor import layout_of_tensor
from vescale_rng._policy import require_native

Generator = torch.Generator | None


class Placing:
    """Which elements of a global tensor a tensor's local part is: as its DTensor says."""

    def held(self, op: Any, tensor: torch.Tensor, generator: Generator = None) -> ShardLayout:
        """Return the layout of the local part of a tensor that `op` draws into.

        Raises:
            LayoutError: it is a DTensor whose local tensors are terms of a sum.
        """
        return held_by_placements(op, tensor)

    def is_whole(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is drawn by torch itself: every rank holds all of it."""
        return not isinstance(tensor, DTensor)

    def held_new(self, op: Any, tensor: torch.Tensor) -> ShardLayout:
        """Return the layout of a tensor that a factory has made of a shape alone."""
        return held_by_placements(op, tensor)

    def local_taken(self, source: DTensor, local: torch.Tensor) -> None:
        """Learn that `local` is what `to_local` gave of a DTensor."""


def held_by_placements(op: Any, tensor: torch.Tensor) -> ShardLayout:
    """Return the layout that a DTensor has on its mesh."""
    if isinstance(tensor, DTensor) and any(place.is_partial() for place in tensor.placements):
        raise LayoutError(
            f"{op} on a DTensor placed as {tensor.placements}: its local tensors are terms of a "
            "sum, not elements. Redistribute it to Replicate() or Shard() first"
        )
    return layout_of_tensor(tensor)


def _wrapped(local: torch.Tensor, like: torch.Tensor, shape: Any, order: Any = None) -> Any:
    """Return a local result as a tensor like `like`: a DTensor placed as it, or a plain one."""
    if not isinstance(like, DTensor):
        return local
    # Said, and not found out: `from_local` would take strides of the shard for those of the global
    # tensor.
    strides = dense_strides(shape, order)
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )


def _filling(make: Callable[..., Distribution]) -> Callable[..., Any]:
    """Make an op that fills its input with draws of `make(**its other arguments)`."""

    def draw_in_place(
        place: Placing, op: Any, input: torch.Tensor, generator: Generator = None, **kwargs: Any
    ) -> Any:
        held = place.held(op, input, generator)
        # The generator as it was given: None is torch's default, which every rank has in the same
        # state.
        fill_(_local(input), make(**kwargs), held, generator)
        return input

    return draw_in_place


def _like(make: Callable[..., Distribution]) -> Callable[..., Any]:
    """Make a factory of tensors like its input, filled with draws of `make(low=, high=)`."""

    def draw_like(
        place: Placing,
        op: Any,
        input: torch.Tensor,
        generator: Generator = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        low: int = 0,
        high: int | None = None,
        device: torch.device | None = None,
        **_: Any,
    ) -> Any:
        if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
            raise LayoutError(f"{op} in {memory_format}: convert its result, or its input before")
        if device is not None and torch.device(device).type != input.device.type:
            raise LayoutError(f"{op} of a tensor on {input.device} for {device}: move its result")
        # Draws follow the memory of the result, so its order decides which element gets which
        # number.
        row_major = memory_format is torch.contiguous_format
        held = place.held(op, input, generator)
        # Like the input in memory, unless torch was asked for a contiguous result.
        local, held = make_like(_local(input), held, dtype, row_major=row_major)
        fill_(local, make(low, high), held, generator)
        return _wrapped(local, input, input.shape, held.memory_order)

    return draw_like


def fill_made(place: Placing, op: Any, input: torch.Tensor, distribution: Distribution) -> Any:
    """Fill what a factory has made."""
    return fill_(input, distribution, place.held(op, input))


def _composed(draw: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Make a dropout that is a composition of ops: it arrives as one op in inference mode."""

    def drop(place: Placing, op: Any, input: torch.Tensor, p: float, train: bool) -> Any:
        if not train or p in (0, 1):
            # Nothing is drawn: what torch does is the same for a shard as for the global tensor.
            return _wrapped(op(_local(input), p, train), input, input.shape)
        held = place.held(op, input)
        return _wrapped(draw(_local(input), p, held), input, input.shape, held.memory_order)

    return drop


def _native_dropout(
    place: Placing, op: Any, input: torch.Tensor, p: float, train: bool | None
) -> tuple[Any, Any]:
    held = place.held(op, input)
    # torch's own modules say True or False; the rounding of None is another.
    results = native_dropout(_local(input), p, train is not False, held)
    # Both placed alike: backward multiplies them element by element.
    result, mask = (_wrapped(r, input, input.shape, held.memory_order) for r in results)
    return result, mask


def _bernoulli_each_(
    place: Placing, op: Any, input: torch.Tensor, p: Any, generator: Generator = None
) -> Any:
    held = place.held(op, input, generator)
    bernoulli_(_local(input), _placed_like(op, p, input), held, generator)
    return input


def _bernoulli(
    place: Placing, op: Any, input: torch.Tensor, p: Any = None, generator: Generator = None
) -> Any:
    held = place.held(op, input, generator)
    if isinstance(p, torch.Tensor):
        # torch makes it row-major, whatever the memory order of the input.
        new, where = make_like(_local(input), held, row_major=True)
        local = bernoulli_(new, _placed_like(op, p, input), where, generator)
    else:
        local = bernoulli(_local(input), held, generator, p=p)
    return _wrapped(local, input, input.shape)


def _normal(place: Placing, op: Any, mean: Any, std: Any, generator: Generator = None) -> Any:
    shaped: Any = mean if isinstance(mean, torch.Tensor) else std
    if not isinstance(shaped, DTensor):
        tensors = [x for x in (mean, std) if isinstance(x, torch.Tensor)]
        # The result is row-major whatever the parameters are; it is what is drawn into.
        shaped = torch.empty(
            torch.broadcast_shapes(  # type: ignore[no-untyped-call]
                *(x.shape for x in tensors)
            ),
            device="meta",
        )
    held = place.held(op, shaped, generator)
    parts = [_placed_like(op, x, shaped) if isinstance(x, torch.Tensor) else x for x in (mean, std)]
    return _wrapped(normal(parts[0], parts[1], held, generator), shaped, shaped.shape)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # Below autograd: what is done to the local part has no graph.
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _placed_like(op: Any, tensor: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """Return the local part of a parameter, for the elements of `example` that are here."""
    if not isinstance(example, DTensor) and not isinstance(tensor, DTensor):
        return tensor
    # One number for all: it is the same on every rank, whatever its placement.
    if tensor.ndim == 0:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if (
        not isinstance(tensor, DTensor)
        or not isinstance(example, DTensor)
        or (tensor.shape != example.shape)
    ):
        raise LayoutError(
            f"{op} takes parameters that are DTensors of the shape {tuple(example.shape)}, got a "
            f"{type(tensor).__name__} of shape {tuple(tensor.shape)}: distribute and expand it"
        )
    # A local comparison, and the same on every rank: either all redistribute or none.
    if tensor.placements == example.placements:
        return tensor.to_local()
    return tensor.redistribute(example.device_mesh, example.placements).to_local()


def _multinomial(
    place: Placing,
    op: Any,
    input: torch.Tensor,
    num_samples: int,
    replacement: bool = False,
    generator: Generator = None,
) -> Any:
    rows = _whole_rows(input)
    held = place.held(op, rows, generator)
    # Rows are what is sharded, so a rank passes by those of the others.
    local = multinomial(_local(rows), num_samples, replacement, layout=held, generator=generator)
    return _wrapped(local, rows, (*rows.shape[:-1], num_samples))


def _whole_rows(input: torch.Tensor) -> torch.Tensor:
    """Return a matrix whose rows are not sharded and not partial."""
    if not isinstance(input, DTensor):
        return input
    # Partial rows are addends: a sample of an addend is none of the sum.
    bad = [p.is_partial() or p.is_shard(input.ndim - 1) for p in input.placements]
    # Sharded rows are gathered along those axes only: others stay as they are.
    placements = [Replicate() if b else p for p, b in zip(input.placements, bad, strict=True)]
    return input.redistribute(placements=placements) if any(bad) else input


def _gathered(place: Placing, op: Any, **kwargs: Any) -> DTensor:
    """Run an op whose values decide how many numbers it uses on global tensors, on every rank."""
    require_native(str(op))
    example = next(x for x in kwargs.values() if isinstance(x, DTensor))
    names = {"input": "self", "low": "from"}
    whole = {
        names.get(name, name): x.full_tensor() if isinstance(x, DTensor) else x
        for name, x in kwargs.items()
    }
    # On every rank with the same values and the same generator, so the results are the same, too.
    result = op(**whole)
    whole_result = DTensor.from_local(
        result, example.device_mesh, [Replicate()] * example.device_mesh.ndim, run_check=False
    )
    # As the operand was, but not partial: what was drawn is complete.
    wanted = [p if isinstance(p, Shard) else Replicate() for p in example.placements]
    return whole_result.redistribute(placements=wanted)


def _rrelu(
    place: Placing, op: Any, input: DTensor, noise: DTensor, lower: float, upper: float, **rest: Any
) -> DTensor:
    if not rest["training"]:
        # What torch does then, and what has a rule of its own.
        evaluated: Any = torch.nn.functional.leaky_relu(input, (lower + upper) / 2)
        return evaluated  # type: ignore[no-any-return]
    # torch writes the slopes that it drew here, for its backward.
    slopes = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    rest.update(input=input, noise=slopes, lower=lower, upper=upper)
    result = _gathered(place, op, **rest)
    _cut_into(noise, slopes)
    return result


def _cut_into(piece: DTensor, whole: torch.Tensor) -> None:
    """Write a global tensor's elements into the local part of a DTensor."""
    local = piece.to_local()
    for box in layout_of_tensor(piece).boxes:
        # `as_strided` counts from the beginning of the storage, and the local part may be a view.
        start = local.storage_offset() + box.local_offset
        sides = zip(box.global_offset, box.shape, strict=True)
        part = whole[tuple(slice(low, low + extent) for low, extent in sides)]
        local.as_strided(box.shape, box.local_strides, start).copy_(part)


def _random(low: int | None = None, to: int | None = None) -> Distribution:
    if low is None and to is None:
        return Random()
    return RandInt(low or 0, to)


# Their values decide how many numbers they use, so a shard cannot be drawn alone.
DATA_DEPENDENT = ("poisson.default", "binomial.default", "rrelu_with_noise.default")

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
    "dropout.default": _composed(dropout),
    "alpha_dropout.default": _composed(alpha_dropout),
    "feature_dropout.default": _composed(feature_dropout),
    "feature_alpha_dropout.default": _composed(feature_alpha_dropout),
    "normal.Tensor_float": _normal,
    "normal.float_Tensor": _normal,
    "normal.Tensor_Tensor": _normal,
    "multinomial.default": _multinomial,
    "poisson.default": _gathered,
    "binomial.default": _gathered,
    "rrelu_with_noise.default": _rrelu,
}
