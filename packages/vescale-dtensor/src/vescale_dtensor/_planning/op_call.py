"""Parses a call of a torch function with DTensors among its arguments, and makes its plan's key.

The key holds the function, the layout of every operand, and the arguments that the rule reads. It
holds no shape, unless the rule reads shapes or a memory order makes them matter, so a plan made for
one batch size serves all others. Nor does it hold Python numbers, unless the rule reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._layout.layout import Order
from vescale_dtensor._layout.spec import order_of
from vescale_dtensor._planning.attention_way import attention_way
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import any_requires_grad


class Reads:
    """Flags for what a rule reads of a call besides the layouts; that becomes part of the key.

    A rule that reads more than it declares gets plans of other calls. Ints and not an `enum.Flag`,
    whose `&` costs half a microsecond at every call.
    """

    NOTHING = 0
    NUMBERS = 1
    """The values of Python numbers: dims, sizes, exponents."""
    SHAPES = 2
    """Global shapes."""
    BROADCAST_PATTERN = 4
    """Which extents are one and which are equal, if shapes differ; not the extents themselves.

    Of several operands the key has it in any case: whether they fit together depends on it.
    """
    ATTENTION_WAY = 8
    """How ranks share attention of sharded sequences; see `sequence_attention`."""
    STRIDES = 16
    """The global strides of operand 0 where these leave gaps, or expand a dim."""


class OpCall:
    """A parsed call.

    Attributes:
        func: the torch function.
        args, kwargs: as the user gave them.
        operands: the tensors among them, at any depth, from left to right; plain ones too.
        key: under which a plan for this call is stored.
        differentiable: whether autograd would record this call.
    """

    __slots__ = ("args", "differentiable", "func", "key", "kwargs", "operands")

    def __init__(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], reads: int
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.operands: list[Tensor] = []
        found: list[Hashable] = [func]
        numbers = bool(reads & Reads.NUMBERS)
        for value in args:
            _scan(value, self.operands, found, numbers)
        for name, value in kwargs.items():
            found.append(name)
            _scan(value, self.operands, found, numbers)
        # Of all operands: a plain tensor that requires grad gets a gradient too.
        self.differentiable = torch.is_grad_enabled() and _any_wanted(self.operands)
        # A recorded call may need another strategy: of some partial values there is no gradient.
        found.append(self.differentiable)
        if reads & Reads.ATTENTION_WAY:
            found.append(attention_way())
        if reads & Reads.STRIDES:
            found.append(_strides_with_gaps(self.operands[0]))
        if reads & Reads.SHAPES:
            found.append(self.shapes())
        elif self._has_order():
            # The results' orders are part of the plan, and dims of extent one have no place in
            # memory, so the order depends on which dims these are.
            found.append(self._broadcast_pattern())
        elif len(self.operands) > 1:
            # Whatever the rule reads: operands of one plan fit together, or none of them do.
            found.append(self._extents())
        self.key = tuple(found)

    @classmethod
    def known(
        cls,
        func: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        operands: list[Any],
        differentiable: bool,
    ) -> OpCall:
        """A call whose plan is known, made without parsing: compiled calls have no need of a key.

        Args:
            func: the torch function.
            args: its arguments by position.
            kwargs: its arguments by name.
            operands: the tensors among them, in order.
            differentiable: whether autograd records it.
        """
        # Past `__init__`, which would walk the arguments again.
        call = cls.__new__(cls)
        call.func, call.args, call.kwargs = func, args, kwargs
        call.operands, call.differentiable, call.key = operands, differentiable, ()
        return call

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Global shapes of the operands."""
        return tuple([tuple(operand.shape) for operand in self.operands])

    def size_ratios(self) -> tuple[int, ...]:
        """Number of elements of each operand relative to the first, as a power of two.

        Rounded so coarsely, since they are part of keys: few ratios occur in a model.
        """
        if len(self.operands) == 1:
            return (0,)
        counts = [prod(shape).bit_length() for shape in self.shapes()]
        return tuple([count - counts[0] for count in counts])

    def _has_order(self) -> bool:
        """Whether an operand is not row-major, so that extents of one matter."""
        for operand in self.operands:
            if isinstance(operand, DTensor):
                spec = operand._spec
                if spec.layout.order is not None or (spec.has_gaps and expanded_dims(operand)):
                    return True
            elif is_strided(operand) and not operand.is_contiguous():
                return True
        return False

    def _extents(self) -> Hashable:
        """What several operands add to the key: their pattern; for equal shapes their length."""
        first = self.operands[0].shape
        for operand in self.operands[1:]:
            if operand.shape != first:
                return self._broadcast_pattern()
        return len(first)

    def _broadcast_pattern(self) -> Hashable:
        """The shapes with each distinct extent numbered in order of appearance; 0 and 1 are known.

        Calls of one pattern broadcast the same dims.
        """
        known: dict[int, int] = {1: 0, 0: -1}
        return tuple(
            [
                tuple([known.setdefault(n, len(known)) for n in operand.shape])
                for operand in self.operands
            ]
        )

    def replaced(self, tensors: Iterable[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with these tensors in place of the operands, in the order of `operands`."""
        feed = iter(tensors)
        args = [
            # Most arguments are DTensors themselves: no call is made for these.
            next(feed) if type(value) is DTensor else substitute(value, feed)
            for value in self.args
        ]
        if not self.kwargs:
            return args, {}
        return args, {name: substitute(value, feed) for name, value in self.kwargs.items()}

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    def dim(self, position: int, default: int | None = None) -> int | None:
        """The argument `dim` as a dim of operand 0; None where it is none, or not given."""
        return wrap_dim(self.argument(position, "dim", default), self.operands[0].ndim)


def _strides_with_gaps(operand: Tensor) -> Hashable:
    if not isinstance(operand, DTensor) or not operand._spec.has_gaps:
        return None
    stride: tuple[int, ...] = operand._spec.tensor_meta.stride
    return stride


def _any_wanted(operands: list[Tensor]) -> bool:
    """Whether one of the operands requires grad."""
    # `DTensor.requires_grad` asks Python for each. C++ knows in one call of none that is marked,
    # but not what a custom Function may have made.
    for operand in operands:
        if isinstance(operand, DTensor) and (
            operand._local_tensor.requires_grad or operand._may_have_hidden_node
        ):
            break
    else:
        if not any_requires_grad(*operands):
            return False
    return any(operand.requires_grad for operand in operands)


def _scan(value: Any, operands: list[Tensor], key: list[Hashable], numbers: bool) -> None:
    """Append an argument to the key, and the tensors in it to `operands`.

    `substitute` walks arguments in the same order.
    """
    if isinstance(value, DTensor):
        operands.append(value)
        # The layout, not the spec, whose shape would make a plan for every batch size.
        spec = value._spec
        key.append(spec.layout)
        key.append((spec.tensor_meta.dtype, spec.ndim))
        # Expanded dims change the order of results.
        if spec.has_gaps:
            key.append(expanded_dims(value))
    # A plain tensor counts as replicated, so its layout is not needed, but its memory order is.
    elif isinstance(value, Tensor):
        operands.append(value)
        key.append((Tensor, value.ndim, value.dtype, _memory(value)))
    elif isinstance(value, list | tuple):
        # With its length, or ([a], b) and ([a, b],) would have one key.
        key.append((type(value), len(value)))
        for item in value:
            _scan(item, operands, key, numbers)
    # Split: slices may hold tensors, and do not hash before Python 3.12.
    elif isinstance(value, slice):
        key.append(slice)
        for item in (value.start, value.stop, value.step):
            _scan(item, operands, key, numbers)
    # Booleans are options (`keepdim`), and count by value.
    elif isinstance(value, int | float | complex) and not isinstance(value, bool):
        key.append(_number(value, numbers))
    else:
        key.append(_constant(value))


def wrap_dim(dim: Any, ndim: int) -> int | None:
    """A dim counted from the front; None where a tensor of so many dims has no such dim.

    A rule that gets None declines: torch then says what is wrong, on every rank.
    """
    return dim % ndim if type(dim) is int and -ndim <= dim < ndim else None


def is_strided(tensor: Tensor) -> bool:
    """Whether a plain tensor has strides: sparse, nested and quantized ones cannot be DTensors."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def memory_order(tensor: Tensor) -> Order | None:
    """The memory order of an operand on one device; None: row-major."""
    if isinstance(tensor, DTensor):
        known: Order | None = tensor._spec.layout.order
        return known
    return None if tensor.is_contiguous() else order_of(tuple(tensor.shape), tensor.stride())


def expanded_dims(tensor: Tensor) -> tuple[int, ...]:
    """The expanded dims of an operand on one device: of stride 0, and more than one index."""
    if isinstance(tensor, DTensor):
        meta = tensor._spec.tensor_meta
        return _expanded(meta.shape, meta.stride) if tensor._spec.has_gaps else ()
    return _expanded(tensor.shape, tensor.stride()) if is_strided(tensor) else ()


def _expanded(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    # A stride of zero in a dim of one index expands nothing.
    pairs = enumerate(zip(shape, strides, strict=True))
    return tuple([dim for dim, (extent, stride) in pairs if not stride and extent > 1])


def _memory(tensor: Tensor) -> Hashable:
    """Part of the key for a plain tensor's memory; None: row-major."""
    if not is_strided(tensor):
        return tensor.layout
    return None if tensor.is_contiguous() else (memory_order(tensor), expanded_dims(tensor))


def _number(value: Any, by_value: bool) -> Any:
    # With the type: 1 == 1.0, but they promote dtypes differently.
    return (type(value), value) if by_value else type(value)


def _constant(value: Any) -> Any:
    # Options (strings, dtypes, callables). What does not hash counts by its type.
    return value if isinstance(value, Hashable) else type(value)


def substitute(value: Any, replacements: Iterator[Any]) -> Any:
    """The same nested structure, with each tensor replaced by the next of `replacements`."""
    if isinstance(value, Tensor):
        return next(replacements)
    if isinstance(value, list | tuple):
        items = [substitute(item, replacements) for item in value]
        return items if isinstance(value, list) else _rebuilt(value, items)
    if isinstance(value, slice):
        return slice(*[substitute(v, replacements) for v in (value.start, value.stop, value.step)])
    return value


def _rebuilt(value: Any, items: list[Any]) -> Any:
    """A tuple, named tuple or subclass of tuple like `value`, with these items."""
    if type(value) is tuple:
        return tuple(items)
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return type(value)(items)
