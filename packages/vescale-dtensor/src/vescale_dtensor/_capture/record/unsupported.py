"""Refuses what cannot be recorded: Python values read from tensors, data-dependent shapes."""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import vescale_comm
import vescale_rng
from torch import Tensor

from vescale_dtensor._errors import CaptureError

# With the slash: torchvision lies beside torch.
_OURS = f"{Path(__file__).parents[2]}/"
_CAPTURE = f"{Path(__file__).parents[1]}/"
# Frames of these stand between the user's line and a torch function. `functools` and `contextlib`
# run decorators, such as `no_grad`.
_NOT_THE_USERS = (
    _OURS,
    *(f"{Path(str(m.__file__)).parent}/" for m in (torch, vescale_comm, vescale_rng)),
    functools.__file__,
    contextlib.__file__,
)

_INSIDE = (*_NOT_THE_USERS, "<")

# Also what gives memory to others: what they write there, or read later, no step shows.
_READERS = """
item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __array__ __contains__ __format__
equal allclose is_nonzero data_ptr untyped_storage storage _typed_storage __dlpack__ share_memory_
"""
_SHAPED_BY_VALUES = """
nonzero argwhere nonzero_numpy masked_select unique unique_dim unique_consecutive _unique _unique2
bincount _pack_padded_sequence pack_padded_sequence histogramdd
"""
_METADATA = """
size dim ndimension numel nelement stride is_contiguous element_size is_floating_point is_complex
is_signed get_device is_same_size has_names dim_order
is_set_to dense_dim sparse_dim __len__ __hash__ result_type can_cast
promote_types type broadcast_shapes is_tensor is_storage
__dir__ __repr__ is_distributed _record_function_enter_new _record_function_exit
_cuda_isCurrentStreamCapturing
"""
_NUMBERS = """
arange range linspace logspace zeros ones empty rand randn randint randperm eye view reshape
unflatten expand repeat tile split chunk unfold topk new_zeros new_ones new_empty tensor_split
"""

READERS = frozenset(_READERS.split())
"""Functions that hand a tensor's values, or its memory, to Python."""

SHAPED_BY_VALUES = frozenset(_SHAPED_BY_VALUES.split())
"""Functions whose result has a shape that depends on values."""

METADATA = frozenset(_METADATA.split())
"""Functions that tell Python what guards hold fixed, or what no result depends on."""

ASKED = frozenset(
    {"is_inference", "is_conj", "is_neg", "is_coalesced", "_is_view", "is_pinned", "is_shared"}
)
"""Functions that no guard compares, either; dispatch asks them of each op."""

UNGUARDED = frozenset({"_version", "_base", "output_nr", "retains_grad"})
"""Properties of tensors that no guard compares."""

_PLAIN = """
shape dtype device requires_grad is_leaf layout ndim is_meta is_cuda is_cpu is_sparse is_quantized
is_nested is_mkldnn is_sparse_csr itemsize nbytes
"""
FIXED = frozenset(
    {getattr(torch.Tensor, name).__get__ for name in _PLAIN.split() if hasattr(torch.Tensor, name)}
)
"""The functions that get properties of tensors which guards fix."""

OF_FUNCTION = (
    "a tensor got its gradient from a custom autograd.Function (a full backward hook of a module "
    "is one), which torch's overrides do not see. Make it a torch.library.custom_op, or call it "
    "outside"
)

# What a GradScaler notes in Python when it calls these is the step of one call.
_OF_SCALERS = frozenset({"_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"})

# A 0-dim tensor where one of these asks for a number is read.
_NUMBERS_ONLY = frozenset(_NUMBERS.split())
_INDEXED = frozenset({"__getitem__", "index"})
# torch takes indices of bytes for masks, too.
_MASKS = (torch.bool, torch.uint8)


def user_line() -> str:
    """The line of code outside of torch and these packages that runs now."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_NOT_THE_USERS, "<")):
            text = linecache.getline(name, frame.f_lineno).strip()
            return f"{name}:{frame.f_lineno}: {text}"
        frame = frame.f_back
    return "(no Python code)"


def called_by_us() -> bool:
    """Whether the torch function that a mode sees was called by this package."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        # The first frame that is neither of torch nor of the recorder decides: what torch's Python
        # code calls on behalf of dispatch counts as called by dispatch.
        here = name.startswith(_OURS) and not name.startswith(_CAPTURE)
        if here or not name.startswith(_INSIDE):
            return here
        frame = frame.f_back
    return False


def refusal(why: str) -> CaptureError:
    """The error for what cannot be recorded, with the line of user code."""
    return CaptureError(f"capture: {why}\n  at {user_line()}")


def check_recordable(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse calls whose results Python, or a shape, would take from values.

    Raises:
        CaptureError: with the line of user code.
    """
    # This package asks for storages to tell which tensors share memory, and reads nothing there.
    if name in READERS and not (name.startswith("untyped") and called_by_us()):
        raise refusal(
            f"{name} reads the value of a tensor into Python, where a replay would go on with the "
            "old one. Keep it a tensor (torch.where, masked_fill), or read it outside"
        )
    if name in _OF_SCALERS:
        raise refusal(
            "a GradScaler's part of the step of an optimizer, which replays would leave out of its "
            "state. Call unscale_, step and update outside; scale may be inside"
        )
    if name == "set_gathered_data":
        raise refusal(
            "`.data =` of a parameter that is gathered for each call: a replay would not tell who "
            "stores it. Write into it: p.copy_(value) under no_grad"
        )
    if _shaped_by_values(name, args, kwargs):
        raise refusal(
            f"{name} reads the value of a tensor for the shape of its result, which depends on "
            "values, and a program has one shape for everything. Use a mask (torch.where, "
            "masked_fill), or call it outside"
        )


def _shaped_by_values(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the shape of a result would depend on the values of tensors."""
    rest = (*args[1:], *kwargs.values())
    if name in SHAPED_BY_VALUES:
        return True
    # With the condition alone it is `nonzero`.
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name in _INDEXED:
        # Integer tensors as indices give a shape that follows from their own.
        return any(_sized_index(item) for item in _flat(rest))
    # With `output_size` the caller says how long the result is.
    if name == "repeat_interleave":
        return any(isinstance(v, Tensor) for v in rest) and kwargs.get("output_size") is None
    # -1 means one class more than the greatest value.
    if name == "one_hot":
        return bool((args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1)
    # A method's own tensor is no number; of these four functions the first argument is one.
    asked = rest if args and isinstance(args[0], Tensor) else (*args, *kwargs.values())
    own = name in ("arange", "range", "linspace", "logspace")
    return name in _NUMBERS_ONLY and any(
        isinstance(v, Tensor) for v in _flat((*args, *rest) if own else asked)
    )


def _sized_index(item: Any) -> bool:
    """Whether one part of an index gives the result a shape that depends on values."""
    if isinstance(item, slice):
        return any(isinstance(v, Tensor) for v in (item.start, item.stop, item.step))
    return isinstance(item, Tensor) and item.dtype in _MASKS


def _flat(values: Any) -> Iterator[Any]:
    """The items of nested lists and tuples."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


@functools.lru_cache(maxsize=4096)
def name_of(func: Callable[..., Any]) -> str:
    """The short name of a torch function; of a property, its own."""
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
        owner = func.__self__  # type: ignore[attr-defined]
        return str(getattr(owner, "__name__", None) or owner.fget.__name__)
    return str(getattr(func, "__name__", func))
