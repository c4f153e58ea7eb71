"""Random numbers: what each rank draws of a tensor are the bits that one device draws there."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.first_gpu.cases import Case, CaseResult, both, holds, same_bits
from tools.first_gpu.rng_shards import (
    FLOATS,
    SPLITS,
    Split,
    distributions,
    many,
    parts,
    shards_beside,
    short,
    strided,
)
from tools.first_gpu.sections import _rng_cuda

SEED = 0x0123456789ABCDEF


def cases(device: torch.device) -> list[Case]:
    """Both policies: float32 of everything first."""
    kinds = distributions()
    native = [Case(f"native {one}, {short(t)}", partial(_native, one, t)) for one, t in kinds]
    portable = [Case(f"portable {one}, {short(t)}", partial(_portable, one, t)) for one, t in kinds]
    drops = [Case(f"dropout, {short(t)}", partial(_dropout, t)) for t in FLOATS]
    given = [
        Case(f"probabilities, {short(t)}", partial(_probabilities, t))
        for t in (torch.float32, torch.float64, torch.bool)
    ]
    others = [Case("how far an op goes", _how_far), Case("state as JSON", _state)]
    first = 6
    return [
        *native[:first], *drops[:1], *given[:1], *portable[:first], *others,
        *_rng_cuda.cases(),
        *drops[1:], *given[1:], *native[first:], *portable[first:],
    ]  # fmt: skip


def _seeded(device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    generator.manual_seed(SEED)
    # Not at the beginning of the stream.
    torch.rand(3, device=device, generator=generator)
    return generator


def _shape(split: Split, device: torch.device) -> tuple[int, ...]:
    return tuple(many(device) if extent == -1 else extent for extent in split.shape)


def _native(distribution: Any, dtype: torch.dtype, device: torch.device) -> CaseResult:
    """Each layout beside torch's own call, and the generator behind it."""
    from vescale_rng import DistributionError, fill_

    def draw(local: Any, layout: Any, generator: torch.Generator) -> None:
        fill_(local, distribution, layout, generator)

    pairs: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for split in SPLITS:
            whole = strided(_shape(split, device), split.order, dtype, device)
            generator = _seeded(device)
            try:
                distribution.draw(whole, generator)
            except (RuntimeError, DistributionError) as error:
                return holds("torch draws it", True, f"torch refuses it: {str(error)[:80]}")
            found, ends = shards_beside(whole, split, draw, lambda: _seeded(device))
            pairs |= found
            pairs |= {
                f"{split.name}, generator of rank {at}": (generator.get_state(), end)
                for at, end in enumerate(ends)
            }
    told = [str(one.message) for one in said if "Triton" in str(one.message)]
    kernel = holds("its kernel is right", not told, told[0] if told else "")
    return both(same_bits(pairs, "torch's bits, for each shard"), *([kernel] if told else []))


def _portable(distribution: Any, dtype: torch.dtype, device: torch.device) -> CaseResult:
    """Each layout on this device beside the whole on the host."""
    from vescale_rng import fill_, use

    def key() -> torch.Generator:
        return torch.Generator().manual_seed(7)

    def draw(local: Any, layout: Any, generator: torch.Generator) -> None:
        with use("portable"):
            fill_(local, distribution, layout, generator)

    pairs: dict[str, Any] = {}
    for split in SPLITS:
        shape = _shape(split, torch.device("cpu"))
        expected = strided(shape, split.order, dtype, torch.device("cpu"))
        generator = key()
        draw(expected, split.whole(shape), generator)
        found, ends = shards_beside(expected.to(device), split, draw, key)
        pairs |= found
        pairs |= {
            f"{split.name}, generator of rank {at}": (generator.get_state(), end)
            for at, end in enumerate(ends)
        }
    return same_bits(pairs, "the host's bits, for each shard")


def _dropout(dtype: torch.dtype, device: torch.device) -> CaseResult:
    """Forward and backward of each shard beside one device's."""
    from vescale_rng import dropout

    pairs: dict[str, Any] = {}
    for split in SPLITS:
        shape = _shape(split, device)
        # Of odd and even extents: the kernel takes wider steps where those divide.
        for columns in {shape[-1], shape[-1] // 8 * 8}:
            pairs |= _dropped(dropout, split, (*shape[:-1], columns), dtype, device)
    return same_bits(pairs, "torch's bits, for each shard")


def _dropped(
    dropout: Any, split: Split, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    from vescale_rng import native_dropout

    values = torch.linspace(1, 2, max(1, torch.Size(shape).numel()), dtype=dtype).view(shape)
    x = strided(shape, split.order, dtype, device).copy_(values).requires_grad_()
    gradient = x.detach().sin()
    torch.manual_seed(3)
    expected = F.dropout(x, 0.3)
    following = torch.rand(3, device=device)
    (back,) = torch.autograd.grad(expected, x, gradient)
    torch.manual_seed(3)
    _, expected_mask = torch.native_dropout(x.detach(), 0.3, True)
    pairs = {}
    for coordinate in split.ranks():
        layout = split.layout(coordinate, shape)
        local = strided(layout.local_shape, split.order, dtype, device)
        own = torch.zeros_like(local)
        for (at, view), (_, other) in zip(parts(local, layout), parts(own, layout), strict=True):
            view.copy_(x.detach()[at])
            other.copy_(gradient[at])
        local.requires_grad_()
        torch.manual_seed(3)
        result = dropout(local, 0.3, layout)
        name = f"{split.name} {shape}, rank {tuple(coordinate)}"
        pairs[f"{name}: next number"] = (following, torch.rand(3, device=device))
        (found,) = torch.autograd.grad(result, local, own)
        for (at, view), (_, other) in zip(
            parts(result.detach(), layout), parts(found, layout), strict=True
        ):
            pairs[f"{name}: forward"] = (expected.detach()[at], view)
            pairs[f"{name}: backward"] = (back[at], other)
        torch.manual_seed(3)
        _, mask = native_dropout(local.detach(), 0.3, True, layout)
        for at, view in parts(mask, layout):
            pairs[f"{name}: mask"] = (expected_mask[at], view)
    return pairs


def _probabilities(dtype: torch.dtype, device: torch.device) -> CaseResult:
    """`bernoulli_` with a tensor of probabilities."""
    from vescale_rng import bernoulli_

    kind = torch.float64 if dtype == torch.float64 else torch.float32
    pairs: dict[str, Any] = {}
    for split in SPLITS[:3]:
        shape = _shape(split, device)
        p = torch.linspace(0, 1, torch.Size(shape).numel(), dtype=kind).view(shape).to(device)
        whole = torch.zeros(shape, dtype=dtype, device=device)
        whole.bernoulli_(p, generator=_seeded(device))

        def draw(local: Any, layout: Any, generator: torch.Generator, p: Any = p) -> None:
            ((at, _),) = parts(local, layout)
            bernoulli_(local, p[at].contiguous(), layout, generator)

        found, _ = shards_beside(whole, split, draw, lambda: _seeded(device))
        pairs |= found
    return same_bits(pairs, "torch's bits, for each shard")


def _how_far(device: torch.device) -> CaseResult:
    """`skip` moves a generator as far as the op does, without running it."""
    from vescale_rng import Normal, Uniform
    from vescale_rng.streams import BernoulliOf, Dropout, skip

    ops: list[tuple[Any, Callable[[Tensor], Tensor]]]
    ops = [(Dropout(), F.dropout), (BernoulliOf(), torch.bernoulli)]
    default = torch.default_generator
    if device.type == "cuda":
        default = torch.cuda.default_generators[device.index or 0]
    pairs = {}
    for size in (1, 15, 16, 257, many(device)):
        for one, dtype in ((Normal(), torch.float32), (Uniform(), torch.float64)):
            drawn, skipped = _seeded(device), _seeded(device)
            one.draw(torch.empty(size, dtype=dtype, device=device), drawn)
            skip(one, (size,), dtype, generator=skipped)
            following = [torch.rand(5, device=device, generator=g) for g in (drawn, skipped)]
            pairs[f"{one} {size}"] = (following[0], following[1])
        for op, run in ops:
            torch.manual_seed(SEED)
            run(torch.full((size,), 0.5, device=device))
            ran = torch.rand(5, device=device)
            torch.manual_seed(SEED)
            skip(op, (size,), generator=default)
            pairs[f"{op} {size}"] = (ran, torch.rand(5, device=device))
    return same_bits(pairs, "the numbers behind an op")


def _state(device: torch.device) -> CaseResult:
    """A generator goes on from plain JSON."""
    from vescale_rng import get_state, set_state

    generator, other = _seeded(device), torch.Generator(device)
    torch.randn(1001, device=device, generator=generator)
    set_state(json.loads(json.dumps(get_state(generator))), other)
    drawn = [torch.randn(1001, device=device, generator=g) for g in (generator, other)]
    return same_bits({"numbers behind it": (drawn[0], drawn[1])}, "the same numbers")
