"""Reductions: which exist for a dtype, and how each one travels over a backend."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_comm._errors import CommArgumentError
from vescale_comm._wire.fold import FOLDS, check_order, fold

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_INTS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
# Wider integers hold every value; sums and products that overflow wrap to the same bits.
_WIDENED = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}

_NATIVE = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # and divided here: backends differ in where they round
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
# Backends that are known to have bitwise reductions.
_WITH_BITWISE = frozenset({"gloo", "simulated"})
_BITWISE = frozenset({"band", "bor", "bxor"})
# Booleans are reduced as the bytes 0 and 1: a backend that adds bools leaves a 2 in memory, which
# torch then takes for neither. Exclusive or is the parity of the sum, also when bytes wrap at 256.
_OF_BOOLS = {
    "sum": "max",
    "bor": "max",
    "max": "max",
    "prod": "min",
    "band": "min",
    "min": "min",
    "bxor": "sum",
}

OPS = tuple(_NATIVE)
"""Names of the reductions."""

Convert = Callable[[Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class Reduction:
    """How one reduction of one dtype travels over one backend.

    Attributes:
        op: name, as the caller gave it.
        backend_op: the backend's operator on the encoded elements.
        dtype: dtype of the caller's tensors.
        encode: makes of a contiguous 1-D tensor the one that is reduced; may return the same.
        decode: makes of the reduced one the result.
        width: elements on the wire for each element.
        native: whether the backend reduces. If not, the members' shards are exchanged and folded
            here, in `order`.
        order: order of the fold.
        wide: dtype in which the fold is done, if not in that of the encoded elements.
        mean: whether the sum is divided by the number of members.
    """

    op: str
    dtype: torch.dtype
    backend_op: dist.ReduceOp.RedOpType
    encode: Convert = _same
    decode: Convert = _same
    width: int = 1
    native: bool = True
    order: str = "rank"
    wide: torch.dtype | None = None
    mean: bool = False

    @property
    def plain(self) -> bool:
        """Whether tensors are reduced by the backend as they are."""
        return self.encode is _same and self.native

    def finish(self, reduced: Tensor, members: int) -> Tensor:
        """Turn what came off the wire, a buffer of our own, into the result."""
        return self.decode(reduced.div_(members) if self.mean else reduced)

    def fold_rows(self, rows: Tensor) -> Tensor:
        """Reduce a (members, n) tensor of encoded elements over its rows, and divide if asked.

        The result is of the encoded dtype: a fold in a wider one is rounded once, here.
        """
        wide = rows if self.wide is None else rows.to(self.wide)
        # torch multiplies complex numbers with other roundings at the end of a buffer than inside.
        multiplied = wide.is_complex() and self.op == "prod"
        combine = _complex_product if multiplied else FOLDS[self.backend_op.name]
        total = fold(wide.unbind(0), combine, self.order)
        if self.mean:
            total = total / rows.shape[0]
        return total.to(rows.dtype)

    def __repr__(self) -> str:
        how = "natively" if self.native else f"by exchange and fold in {self.order} order"
        return f"Reduction({self.op} of {self.dtype}, {how})"


@lru_cache(maxsize=1024)
def reduction(op: str, dtype: torch.dtype, backend: str, order: str = "native") -> Reduction:
    """Plan how `op` on tensors of `dtype` is carried by `backend`.

    Raises:
        CommArgumentError: no such op or order, or the op does not exist for this dtype.
    """
    check_order(order)
    if op not in _NATIVE:
        raise CommArgumentError(f"unknown op {op!r}; there are {', '.join(OPS)}")
    planned = _planned(op, dtype, backend)
    if order == "native":
        return planned
    part = _COMPLEX.get(dtype, dtype)
    wide = torch.float32 if part.is_floating_point and part.itemsize < 4 else None
    if dtype.is_floating_point:  # as it is: torch folds it, and keeps a NaN
        planned = Reduction(op, dtype, _NATIVE[op], mean=op == "avg")
    return replace(planned, native=False, order=order, wide=wide)


def _planned(op: str, dtype: torch.dtype, backend: str) -> Reduction:
    native = _NATIVE[op]
    if op in ("max", "min") and (dtype in _FLOATS or _is_float8(dtype)):
        return Reduction(op, dtype, native, _ordered(op), _from_ordered(dtype))
    if dtype in _FLOATS and op not in _BITWISE:
        return Reduction(op, dtype, native, mean=op == "avg")
    if _is_float8(dtype) and op not in _BITWISE:
        encode, decode = _cast(torch.float32), _cast(dtype)
        return Reduction(op, dtype, native, encode, decode, mean=op == "avg")
    # Products of halves are what torch cannot fold on a CPU.
    ops = ("sum", "avg") if dtype is torch.complex32 else ("sum", "avg", "prod")
    if dtype in _COMPLEX and op in ops:
        return _of_complex(op, dtype)
    if dtype is torch.bool and op != "avg":
        return _of_bools(op)
    if not dtype.is_floating_point and not dtype.is_complex and op != "avg":
        return _of_integers(op, dtype, backend)
    raise CommArgumentError(f"op {op!r} is not defined for {dtype}: {_advice(op)}")


@lru_cache(maxsize=2)
def _ordered(op: str) -> Convert:
    """Make integers of floats that compare as these do, with NaN as torch has it: beyond all.

    gloo compares floats by functions that drop a NaN, and others may; torch's keep it.
    """
    # By its sign, beyond the one infinity or the other.
    nan = math.copysign(math.nan, 1 if op == "max" else -1)

    def encode(x: Tensor) -> Tensor:
        wide = x if x.dtype in _BITS else x.float()  # exact, and halves have no integers on wires
        marked = torch.where(wide.isnan(), nan, wide)
        return _mirrored(marked.view(_BITS[wide.dtype]))

    return encode


@lru_cache(maxsize=32)
def _from_ordered(dtype: torch.dtype) -> Convert:
    wide = dtype if dtype in _BITS else torch.float32
    return lambda x: _mirrored(x).view(wide).to(dtype)


def _mirrored(bits: Tensor) -> Tensor:
    """Turn around the order of negative numbers, whose bits count their distance from 0."""
    greatest = torch.iinfo(bits.dtype).max
    return torch.where(bits < 0, bits ^ greatest, bits)


def _of_complex(op: str, dtype: torch.dtype) -> Reduction:
    if op == "prod":
        # No backend multiplies complex numbers, and their parts do not multiply one by one.
        return Reduction(op, dtype, _NATIVE[op], native=False)
    encode, decode = _view(_COMPLEX[dtype]), _view(dtype)
    return Reduction(op, dtype, _NATIVE[op], encode, decode, 2, mean=op == "avg")


def _of_bools(op: str) -> Reduction:
    decode = _parity if op == "bxor" else _cast(torch.bool)
    return Reduction(op, torch.bool, _NATIVE[_OF_BOOLS[op]], _view(torch.uint8), decode)


def _of_integers(op: str, dtype: torch.dtype, backend: str) -> Reduction:
    encode, decode = _integer_codec(op, dtype)
    # NCCL has none, and of other backends nothing is known.
    native = op not in _BITWISE or backend in _WITH_BITWISE
    return Reduction(op, dtype, _NATIVE[op], encode, decode, native=native)


def _integer_codec(op: str, dtype: torch.dtype) -> tuple[Convert, Convert]:
    if dtype in _INTS:
        return _same, _same
    if dtype in _WIDENED:
        return _cast(_WIDENED[dtype]), _cast(dtype)
    if dtype is torch.uint64:
        # As signed numbers the bits add and multiply alike; they compare alike after a flip of the
        # highest one.
        return (_flip, _unflip) if op in ("max", "min") else (_view(torch.int64), _view(dtype))
    raise CommArgumentError(f"op {op!r} is not defined for {dtype}")


def _advice(op: str) -> str:
    if op == "avg":
        return "an average of integers is not an integer; reduce a floating-point copy"
    return "convert the tensor first"


def divided_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor is divided: a wider one where torch cannot in its own."""
    if _is_float8(dtype):
        return torch.float32
    return torch.complex64 if dtype is torch.complex32 else dtype


def _is_float8(dtype: torch.dtype) -> bool:
    # By name: there are packed 4-bit dtypes of one byte as well, and they convert to nothing.
    return str(dtype).startswith("torch.float8_")


@lru_cache(maxsize=64)
def _cast(dtype: torch.dtype) -> Convert:
    return lambda x: x.to(dtype)


@lru_cache(maxsize=64)
def _view(dtype: torch.dtype) -> Convert:
    return lambda x: x.view(dtype)


def _complex_product(x: Tensor, y: Tensor) -> Tensor:
    """(a + bi)(c + di) = (ac - bd) + (ad + bc)i, each operation rounded by itself."""
    a, b, c, d = x.real, x.imag, y.real, y.imag
    return torch.complex(a * c - b * d, a * d + b * c)


def _parity(x: Tensor) -> Tensor:
    return (x & 1).to(torch.bool)


def _flip(x: Tensor) -> Tensor:
    return x.view(torch.int64) ^ torch.iinfo(torch.int64).min


def _unflip(x: Tensor) -> Tensor:
    return (x ^ torch.iinfo(torch.int64).min).view(torch.uint64)
