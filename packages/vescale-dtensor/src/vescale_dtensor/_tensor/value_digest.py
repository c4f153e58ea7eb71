"""Digests of values that all ranks should hold alike: compared at once, or as a part of a lineage.

A digest that is taken now and then, and joins the lineage of a tensor, costs no collective: ranks
that hold other values are told where the tensor is communicated (see `lineage`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import ExecutionLog, agreement

from vescale_dtensor._layout.executed import log_of, silent
from vescale_dtensor._torch.compat import dispatch_modes, no_torch_function

# Odd 64-bit constants (splitmix64's, as signed numbers): multiplication by each is a bijection.
_STEP, _MIX = -7046029254386353131, -4658895280553007687

# Words whose digest is computed at once.
_PART = 1 << 22

# Events of a mesh in which values are looked at: the first ones, and some of every so many. By the
# events and not by a count of the calls, which ranks may make alone.
_FIRST, _EVERY, _SOME = 256, 4096, 32

_NUMBERS = frozenset({bool, int, float, complex})
_SEQUENCES = frozenset({tuple, list, torch.Size})
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
# These name where a tensor lies, which is another place on each rank.
_PLACES = frozenset({"device", "generator"})
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
    log = log_of(mesh)
    if log is None or not _is_looked_at(log):
        return ()
    return tuple(map(_value, values))


def _is_looked_at(log: ExecutionLog) -> bool:
    # Where nothing is compared, the events are not counted either.
    sampled = log.enabled and (log.count < _FIRST or log.count % _EVERY < _SOME)
    return sampled and not silent.get()


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
    """`_item` of each, at the cost of one; empty where they are not all plain tensors without dims.

    Optimizers pass the count of the steps of each parameter.
    """
    for one in values:
        if type(one) not in _PLAIN or one.ndim or one.layout is not torch.strided or one.is_meta:
            return []
    if not values or dispatch_modes():
        return []
    if any([one.is_cuda for one in values]):
        return _at_once(list(values))
    with torch.no_grad(), no_torch_function():
        return [one.item() for one in values]


def _at_once(values: list[Tensor]) -> list[Any]:
    """The numbers of tensors on one device by one copy to the host; empty where that cannot be."""
    first = values[0]
    alike = all(one.device == first.device and one.dtype == first.dtype for one in values)
    if not alike or any(map(_is_hidden, values)):
        return []
    with torch.no_grad(), no_torch_function():
        found: list[Any] = torch.stack(values).tolist()
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


def number_token(numbers: Iterable[Any]) -> int:
    """Return one number for what `numbers_within` found, in any order: the same in every process.

    A call may come with its arguments by name, or as torch's parser names them.
    """
    return sum(agreement.digest(repr(each)) for each in numbers)
