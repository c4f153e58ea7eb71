"""`out=`: runs a function without it, and writes the result into the tensor that was passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.set_data import set_
from vescale_dtensor._dispatch.execute import rebuild_like
from vescale_dtensor._dispatch.fallback import fallback
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._planning.op_call import is_strided
from vescale_dtensor._planning.plan import function_name
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.opmath import autocast_off
from vescale_dtensor._torch.schemas import without_out

# Functions that compute in the dtype of `out`; all others cast their result to it.
_AS_OUT = frozenset({"sum", "prod", "cumsum", "cumprod"})


def call_with_out(
    func: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    compute: Callable[[Callable[..., Any], Any, dict[str, Any]], Any],
) -> Any:
    """Run a call that has `out=`, write the result into that, and return it.

    Args:
        func: the torch function.
        args: its arguments by position.
        kwargs: its arguments by name, `out` among them; it is removed.
        compute: runs the call that is left, which may have no DTensor in it.

    Raises:
        UnsupportedError: `out` does not match the results in number or shape.
        RuntimeError: as in torch, a dtype that cannot be cast, or a gradient that is wanted.
    """
    out = kwargs["out"]
    if isinstance(out, Tensor) and not isinstance(out, DTensor) and not is_strided(out):
        return fallback(func, args, kwargs)  # which writes to plain operands themselves
    plain = without_out(func, len(args), kwargs)
    if plain is None:
        return fallback(func, args, kwargs)
    func = plain
    del kwargs["out"]
    if getattr(func, "__name__", "") in _AS_OUT and isinstance(out, Tensor):
        kwargs.setdefault("dtype", out.dtype)
    # torch's overloads with `out` ignore autocast.
    with autocast_off(_device_type(out)):
        result = compute(func, args, kwargs)
    if isinstance(result, Tensor) and isinstance(out, Tensor):
        return _write_out(func, result, out)
    several = isinstance(result, list | tuple) and isinstance(out, list | tuple)
    if not several or len(result) != len(out):
        raise UnsupportedError(
            f"{function_name(func)}(out=…) with DTensor operands: out must be one tensor, or as "
            "many as there are results"
        )
    found = [_write_out(func, r, o) for r, o in zip(result, out, strict=True)]
    # As torch does: unbind_copy and split_with_sizes_copy return nothing then.
    return None if function_name(func).endswith("_copy") else rebuild_like(result, found)


def _device_type(out: Any) -> str:
    """Device type of `out`, or of the first of several."""
    first = out if isinstance(out, Tensor) else next(iter(out), None)
    return first.device.type if isinstance(first, Tensor) else "cpu"


def _write_out(func: Callable[..., Any], result: Tensor, out: Tensor) -> Tensor:
    """Write one result into one `out`; an `out` without elements is resized, as in torch."""
    _check_out(func, result, out)
    if tuple(result.shape) == tuple(out.shape):
        return out.copy_(result)
    if out.numel() == 0 and isinstance(out, DTensor) and isinstance(result, DTensor):
        return set_(out, result.to(out.dtype))
    if out.numel() == 0 and not isinstance(result, DTensor):
        return out.resize_(result.shape).copy_(result)
    raise UnsupportedError(
        f"{function_name(func)}(out=…): the result has the shape {tuple(result.shape)}, out "
        f"{tuple(out.shape)}; a DTensor is not resized"
    )


def _check_out(func: Callable[..., Any], result: Tensor, out: Tensor) -> None:
    """Raise what torch raises for a result that does not fit its `out`."""
    if not torch.can_cast(result.dtype, out.dtype):
        raise RuntimeError(
            f"{function_name(func)}(out=…): result type {result.dtype} can't be cast to {out.dtype}"
        )
    if torch.is_grad_enabled() and (result.requires_grad or out.requires_grad):
        raise RuntimeError(
            f"{function_name(func)}(out=…) does not support automatic differentiation, but one of "
            "the arguments requires grad"
        )
