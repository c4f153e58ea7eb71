"""Calls of attention that torch refuses: refused on every rank, before anything is sent.

The fallback would ask torch only when all operands are gathered, and of ranks with different
shards those that hold nothing would not hear of it: their kernels have nothing to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._errors import LayoutError, UnsupportedError
from vescale_dtensor._planning import OpCall
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import no_torch_function

_PARTS = ("query", "key", "value")
_NUMBERS = frozenset({int, float, bool})
# Weights of a call that torch is asked about as it is; of larger ones, with fewer rows and keys.
_MOST = 2**16


def require_accepted(call: OpCall, given: Mapping[str, Any]) -> None:
    """Raise what torch raises about a call, if it does. Nothing is sent.

    Args:
        call: of attention.
        given: its arguments by name.

    Raises:
        LayoutError: keys and values are not equally many.
        UnsupportedError: the rate of dropout is no probability.
        Exception: torch's own, with what the call was.
    """
    parts = [given[name] for name in _PARTS]
    key, value = parts[1:]
    if key.ndim > 1 < value.ndim and key.shape[-2] != value.shape[-2]:
        # torch's kernels read as many values as there are keys, wherever these end.
        raise LayoutError(
            f"{_said(given)}: {key.shape[-2]} keys and {value.shape[-2]} values. Give as many"
        )
    if _is_usual(given):
        return
    _ask(call, given)
    rate = given.get("dropout_p", 0.0)
    if not 0 <= rate <= 1:
        raise UnsupportedError(f"{_said(given)}: dropout_p={rate} is no probability, from 0 to 1")


def _is_usual(given: Mapping[str, Any]) -> bool:
    """Whether a call is one that no kernel refuses; of others torch is asked."""
    query, key, value = (given[name] for name in _PARTS)
    rate, scale = given.get("dropout_p", 0.0), given.get("scale")
    numbers = type(rate) in _NUMBERS and (scale is None or type(scale) in _NUMBERS)
    if not numbers or not 0 <= rate <= 1 or not query.ndim == key.ndim == value.ndim == 4:
        return False
    dtype = query.dtype
    if not dtype == key.dtype == value.dtype or not dtype.is_floating_point:
        return False
    # Each shape is asked for once: the first call with every shape comes here.
    (rows, heads, _, width), (others, keys, _, same), valued = query.shape, key.shape, value.shape
    grouped = bool(given.get("enable_gqa")) and keys > 0 and not heads % keys
    leads = rows == others == valued[0] and width == same
    if not leads or keys != valued[1] or not (heads == keys or grouped):
        return False
    mask = given.get("attn_mask")
    return mask is None or (not given.get("is_causal") and _is_usual_mask(mask, query, key))


def _is_usual_mask(mask: Any, query: Tensor, key: Tensor) -> bool:
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return False
    wanted = (*query.shape[:3], key.shape[2])[4 - mask.ndim :]
    pairs = zip(mask.shape, wanted, strict=False)
    return 2 <= mask.ndim <= 4 and all(one in (1, other) for one, other in pairs)


def _ask(call: OpCall, given: Mapping[str, Any]) -> None:
    """Have torch look at operands like these, without their values."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    known = _extents(given)
    asked = {name: _stand_in(name, one, known) for name, one in given.items()}
    rate = given.get("dropout_p", 0.0)
    drops = isinstance(rate, int | float) and 0 < rate <= 1
    # Of a rate of one no random numbers are drawn: none are this program's.
    asked |= {"dropout_p": 1.0} if drops else {}
    kernels = sdpa_kernel(SDPBackend.MATH) if drops else nullcontext()
    try:
        # Hidden from function modes: the question is no part of the program that a mode records.
        with no_torch_function(), kernels:
            call.func(**asked)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        said = f"{error} [{_said(given)}; asked before anything was sent]"
        raise type(error)(said) from None


def _extents(given: Mapping[str, Any]) -> dict[int, int]:
    """For each number of rows or keys a smaller one; different ones for different ones."""
    query, key = given["query"], given["key"]
    if prod(query.shape[:-1]) * key.shape[-2:-1].numel() <= _MOST:
        return {}
    several = [given[name].shape[-2:-1] for name in _PARTS]
    mask = given.get("attn_mask")
    several += [mask.shape[-2:]] if isinstance(mask, Tensor) else []
    found = sorted({extent for shape in several for extent in shape if extent > 1})
    return {extent: 2 + at for at, extent in enumerate(found)}


def _stand_in(name: str, value: Any, known: Mapping[int, int]) -> Any:
    if not isinstance(value, Tensor):
        return value
    shape = list(value.shape)
    last = 2 if name == "attn_mask" else 1
    for dim in range(-2, last - 2):
        if -dim <= len(shape):
            shape[dim] = known.get(shape[dim], shape[dim])
    made = torch.zeros(shape, dtype=value.dtype, device=value.device)
    # Kernels are chosen by it, and refuse different things.
    return made.requires_grad_() if value.requires_grad else made


def _said(given: Mapping[str, Any]) -> str:
    """A call in words: layouts of its operands, and what else was given."""
    words = [f"{name}: {_described(value)}" for name, value in given.items() if value is not None]
    return f"scaled_dot_product_attention({', '.join(words)})"


def _described(value: Any) -> str:
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)
