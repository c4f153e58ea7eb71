"""Digests of values that all ranks should hold alike: compared at once, or as a part of a lineage.

A digest that is taken now and then, and joins the lineage of a tensor, costs no collective: ranks
that hold other values are told where the tensor is communicated (see `lineage`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import agreement
from vescale_comm.nested import tensors_within

from vescale_dtensor._layout.execution_events import sampling_of, silent
from vescale_dtensor._torch.compat import dispatch_modes, no_torch_function

# Odd 64-bit constants (splitmix64's, as signed numbers): multiplication by each is a bijection.
_STEP, _MIX = -7046029254386353131, -4658895280553007687

# Words whose digest is computed at once.
_PART = 1 << 22

_NUMBERS = frozenset({bool, int, float, complex})
_SEQUENCES = frozenset({tuple, list, torch.Size})
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
# These name where a tensor lies, which is another place on each rank.
_PLACES = frozenset({"device", "generator"})
# Operands whose values do not matter, and may be uninitialized memory that differs from rank to
# rank: those that are overwritten, those that only give a shape or dtype, and those scaled by
# `beta=0`.
_OVERWRITING = (
    frozenset({"copy_", "__setitem__", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"})
    | {"index_copy_", "index_fill_", "index_put_", "put_", "scatter_", "masked_fill_"}
    | {"masked_scatter_", "bernoulli_", "uniform_", "normal_", "set_", "resize_as_"}
)
_AS_PATTERN = frozenset({"view_as", "reshape_as", "expand_as", "type_as", "resize_as_"})
_SCALED = frozenset({"addmm", "addmv", "addr", "addbmm", "baddbmm", "sspaddmm"})
_DEVICES = ("cpu", "cuda", "xpu", "hpu", "mtia", "ipu", "mps", "meta")


def digest(tensor: Tensor) -> Tensor:
    """A 64-bit digest of a tensor's bytes, computed on its device: shape [1], int64."""
    if not tensor.numel():
        # Its strides may be such that torch views no words in it.
        return torch.zeros(1, dtype=torch.int64, device=tensor.device)
    # As bytes, so that NaN equals itself and dtypes need no cases; -0.0 and 0.0 differ.
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    if flat.stride(0) != 1:  # a single element may have any
        flat = flat.as_strided(flat.shape, (1,))
    flat = flat.view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))
    words = flat.view(torch.int64)
    # In parts, as what is mixed takes several times their memory. Integer overflow wraps, so that a
    # sum of sums is the sum of all.
    parts = torch.split(words, _PART) if words.numel() > _PART else (words,)
    sums = [_mixed(part, 1 + at * _PART).sum() for at, part in enumerate(parts)]
    return (sums[0] if len(sums) == 1 else torch.stack(sums).sum()).reshape(1)


def _mixed(words: Tensor, first: int) -> Tensor:
    # With their positions, so that swapped words change the sum.
    places = torch.arange(first, first + words.numel(), device=words.device) * _STEP
    mixed = (words ^ places) * _MIX
    return (mixed ^ (mixed >> 29)) * _STEP


def sampled_digests(mesh: DeviceMesh, values: list[Tensor]) -> tuple[int, ...]:
    """Digests of what tensors hold; empty where nobody looks at this point of the program."""
    looking = sampling_of(mesh).samples and not silent.get()
    return tuple(map(_value, values)) if looking else ()


def _value(tensor: Tensor) -> int:
    """A digest of what it holds; 0 where nobody may look."""
    if _is_hidden(tensor):
        return 0
    with torch.no_grad(), no_torch_function():
        return int(digest(tensor).item())


def _item(tensor: Tensor) -> Any:
    """The number that a plain tensor without dims holds; 0 where nobody may look."""
    if _is_hidden(tensor):
        return 0
    with torch.no_grad(), no_torch_function():
        return tensor.item()


def _items(values: Any) -> list[Any]:
    """`_item` of each, at the cost of one; empty where they are not plain numbers on one device.

    Optimizers pass the count of the steps of each parameter.
    """
    numbers = all([type(one) in _PLAIN and not one.ndim and _has_item(one) for one in values])
    if not values or not numbers or any(map(_is_hidden, values)):
        return []
    if len({(one.device, one.dtype) for one in values}) > 1:
        return []
    with torch.no_grad(), no_torch_function():
        found: list[Any] = torch.stack(list(values)).tolist()
        return found


def _has_item(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _is_hidden(tensor: Tensor) -> bool:
    return bool(dispatch_modes() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()))


def numbers_within(values: Iterable[Any], named: Mapping[str, Any]) -> list[Any]:
    """Return numbers, words and dtypes among the arguments of a call, also those in sequences.

    A plain tensor without dims is a number. Names of devices are left out.

    Args:
        values: the arguments by position.
        named: those by name.
    """
    found: list[Any] = []
    # What is scaled by zero is not read, and may be memory that nobody has written.
    unread = bool(named) and type(beta := named.get("beta")) in _NUMBERS and not beta
    given = [value for name, value in named.items() if name not in _PLACES] if named else ()
    for value in (*values, *given):
        kind = type(value)
        if kind in _NUMBERS:
            found.append(value)
        elif kind is torch.dtype:
            found.append(str(value))
        elif kind is str and not value.startswith(_DEVICES):
            found.append(value)
        elif kind is slice:
            found.append(numbers_within((value.start, value.stop, value.step), {}))
        elif kind in _SEQUENCES:
            inside = _items(value) or numbers_within(value, {})
            if inside:
                found.append(inside)
        elif kind in _PLAIN and not value.ndim and not unread and _has_item(value):
            found.append(_item(value))
    return found


def unread_operands(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the operands on whose values no result of a call depends.

    Args:
        name: of the torch function.
        args: by position.
        kwargs: by name.
    """
    if name in _AS_PATTERN:
        return tensors_within((args, *kwargs.values()))[-1:]
    scaled_by_zero = name.rstrip("_") in _SCALED and kwargs.get("beta", 1) == 0
    return tensors_within(args[0]) if args and (scaled_by_zero or name in _OVERWRITING) else []


def values_within(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return a digest of the plain tensors with dims that a call reads; empty without any."""
    given = tensors_within((args, *kwargs.values()))
    plain = [one for one in given if type(one) in _PLAIN and one.ndim and _has_item(one)]
    if not plain:
        return ()
    unread = set(map(id, unread_operands(name, args, kwargs)))
    return (sum(_value(one) for one in plain if id(one) not in unread),)


def number_token(numbers: Iterable[Any]) -> int:
    """Return one number for what `numbers_within` found, in any order: the same in every process.

    A call may come with its arguments by name, or as torch's parser names them.
    """
    return sum(agreement.digest(repr(each)) for each in numbers)
