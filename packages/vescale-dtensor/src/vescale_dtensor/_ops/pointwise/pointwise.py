"""Pointwise operations: every dim may be sharded; broadcasting aligns from the right."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor._ops.common.functions import both_forms, entries, functions
from vescale_dtensor._ops.common.letters import broadcast_letters, letters, no_letters
from vescale_dtensor._ops.common.memory_formats import MEMORY_FORMATS, order_of_operand
from vescale_dtensor._planning import Dims, OpCall, Reads, Rule, Signature, Strategy

# Linear in the one operand that is a tensor.
_LINEAR = "neg negative conj_physical __neg__"
# Only move or copy elements: any partial passes.
_CARRYING = "clone detach alias"
# Linear in all operands at once.
_ADDING = "add sub subtract __radd__ __rsub__ rsub"
# Linear in each operand by itself.
_MULTIPLYING = "mul multiply __rmul__"
# Linear in the first operand.
_DIVIDING = "div divide true_divide __truediv__"
# The dtype of the results, or that of their parts.
_NAMED = {
    **{"float": torch.float32, "double": torch.float64},
    **{"half": torch.float16, "bfloat16": torch.bfloat16},
    **{"cfloat": torch.float32, "cdouble": torch.float64, "chalf": torch.float16},
}
_CASTING = " ".join(("to cpu cuda type_as", *_NAMED))

_NONLINEAR = """
abs absolute acos acosh arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atan2 arctan2
atanh bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift ceil
celu clamp clip clamp_min clamp_max copysign cos cosh deg2rad digamma elu eq equal_ erf erfc erfinv
exp exp2 expm1 floor floor_divide fmax fmin fmod frac gcd ge gelu greater greater_equal gt
hardsigmoid hardswish hardtanh heaviside hypot i0 isclose isfinite isinf isnan isneginf isposinf lcm
ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2
logical_and logical_not logical_or logical_xor logit logsigmoid lt masked_fill maximum minimum mish
mvlgamma nan_to_num ne nextafter not_equal polygamma pow rad2deg reciprocal relu relu6 remainder
round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt
square tan tanh tanhshrink threshold trunc fix xlogy addcmul addcdiv bool int long short char byte
float_power __rpow__ __rfloordiv__ __rtruediv__ __rdiv__ __floordiv__ __rmod__ __mod__ __eq__ __ne__
__lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __invert__ __ror__ __rxor__ __rand__ __pow__
hardshrink prelu_ erfcx ndtr expit entr __lshift__ __rshift__ __rlshift__ __rrshift__ angle isreal
igamma igammac gammainc gammaincc fill polar complex gammaln multigammaln psi i0e i1 i1e ndtri
log_ndtr xlog1py zeta airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0
modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0
scaled_modified_bessel_k1 spherical_bessel_j0 chebyshev_polynomial_t chebyshev_polynomial_u
chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he
laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t
shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
"""

# Of torch.nn.functional: an argument `inplace` makes them write.
_FLAGGED = """
relu relu6 leaky_relu elu celu selu hardtanh hardswish hardsigmoid silu mish threshold
"""


def _signature(
    call: OpCall, linear: tuple[tuple[int, ...], ...], carries: bool = False
) -> Strategy:
    inputs, output = broadcast_letters(call.shapes())
    return Signature(
        inputs, (output,), linear=linear, preserves_partial=carries, elementwise=True
    ).strategy()


def _nonlinear(call: OpCall) -> Strategy:
    return _signature(call, ())


def _where(call: OpCall) -> Strategy | None:
    """`where(condition)` alone is `nonzero`, which is not pointwise."""
    return None if len(call.args) + len(call.kwargs) == 1 else _signature(call, ())


def _linear(call: OpCall) -> Strategy:
    return _signature(call, ((0,),))


def _carrying(call: OpCall) -> Strategy:
    return _in_asked_order(call, _signature(call, (), carries=True))


def _in_asked_order(call: OpCall, strategy: Strategy) -> Strategy:
    """With the memory order that the call asks for, or that of the operand."""
    listed = [v for v in call.args if isinstance(v, torch.memory_format)]
    wanted = listed[0] if listed else call.kwargs.get("memory_format", torch.preserve_format)
    order = MEMORY_FORMATS.get(wanted)
    if wanted is torch.preserve_format:
        order = order_of_operand(call)
    return replace(strategy, output_orders=(order,))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex)


def _adding(call: OpCall) -> Strategy:
    numbers = any(_is_number(value) for value in (*call.args[:2], call.kwargs.get("other")))
    # `alpha` as a tensor is a factor: the op is not linear in it and the operands jointly.
    # A number is added once per rank, so that no partial operand may stay partial.
    numbers = numbers or isinstance(call.kwargs.get("alpha"), Tensor)
    joint = () if numbers else (tuple(range(len(call.operands))),)
    return _signature(call, joint)


def _multiplying(call: OpCall) -> Strategy:
    return _signature(call, tuple([(i,) for i in range(len(call.operands))]))


def _dividing(call: OpCall) -> Strategy:
    dividend_first = call.args and isinstance(call.args[0], Tensor)
    rounded = call.argument(2, "rounding_mode") is not None
    return _signature(call, ((0,),) if dividend_first and not rounded else ())


def _holds(dtype: torch.dtype, numbers: torch.dtype) -> bool:
    """Whether each number of the other floating dtype is one of this dtype."""
    if not numbers.is_floating_point:
        return True
    wide, narrow = torch.finfo(dtype), torch.finfo(numbers)
    return wide.eps <= narrow.eps and wide.max >= narrow.max


def _casting(call: OpCall) -> Strategy:
    dtypes = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, torch.dtype)]
    other = call.operands[1].dtype if len(call.operands) > 1 else None
    own, named = call.operands[0].dtype, _NAMED.get(call.func.__name__)
    targets = [d for d in (*dtypes, other, named) if d is not None]
    # A narrower one would round each rank's part by itself, where one device rounds the sum.
    exact = all(d.is_floating_point and _holds(d, own) for d in targets)
    dims = letters(call.operands[0].ndim)
    inputs: list[Dims] = [dims, *(no_letters(o) for o in call.operands[1:])]
    floating = exact and own.is_floating_point
    same = len(inputs) == 1 and all(d == own for d in dtypes) and not named
    linear = ((0,),) if floating and not same else ()
    signature = Signature(
        tuple(inputs), (dims,), linear=linear, preserves_partial=same, elementwise=True
    )
    return _in_asked_order(call, signature.strategy())


def _copying(call: OpCall) -> Strategy:
    """Linear, unless a cast rounds: partial sums would each be rounded."""
    exact = len({operand.dtype for operand in call.operands}) == 1
    return _signature(call, (tuple(range(len(call.operands))),) if exact else ())


def _zeroing(call: OpCall) -> Strategy:
    return _signature(call, (), carries=True)


# An in-place form, `name_`, has the same strategy.
_FAMILIES: tuple[tuple[str, Callable[[OpCall], Strategy | None]], ...] = (
    (_LINEAR, _linear),
    (_ADDING, _adding),
    (_MULTIPLYING, _multiplying),
    (_DIVIDING, _dividing),
    (_CASTING, _casting),
    (_NONLINEAR, _nonlinear),
    ("where", _where),
)
# What has an in-place form only, or operators of Python with a name of their own.
_WRITING: tuple[tuple[str, Callable[[OpCall], Strategy | None]], ...] = (
    ("copy_", _copying),
    ("zero_", _zeroing),
    ("__iadd__ __isub__", _adding),
    ("__imul__", _multiplying),
    ("__idiv__ __itruediv__", _dividing),
    ("__iand__ __ior__ __ixor__ __ilshift__ __irshift__", _nonlinear),
    ("__ifloordiv__ __imod__ __ipow__", _nonlinear),
)


def _rules() -> dict[Any, Rule]:
    rules: dict[Any, Rule] = {}
    # `detach_` is no op on data: it has a handler.
    rules |= entries(_CARRYING, Rule("pointwise", _carrying, Reads.BROADCAST_PATTERN))
    for names, strategy in _FAMILIES:
        rules |= both_forms(names, Rule("pointwise", strategy, Reads.BROADCAST_PATTERN))
    for names, strategy in _WRITING:
        rules |= entries(names, Rule("pointwise", strategy, Reads.BROADCAST_PATTERN).writing)
    for func in functions("detach to alias cpu cuda"):
        rules[func] = replace(rules[func], views=True)
    for name in _FLAGGED.split():
        func = getattr(F, name)
        flag = list(inspect.signature(func).parameters).index("inplace")
        rules[func] = replace(rules[func], flag=flag)
    return rules


RULES = _rules()
