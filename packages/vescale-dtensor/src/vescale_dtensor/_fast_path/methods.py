"""Methods of `DTensor` that look up a compiled call before torch's C++ takes over.

A method of `torch.Tensor` parses its arguments in C++, finds a subclass, and calls
`__torch_function__`. That takes about one microsecond, in which a method defined here has found its
compiled call (see `lookup`). Unknown calls, and all calls while somebody observes, are passed on to
torch's own method: its parser knows which arguments there are.

`__getitem__` is not among them: a class that defines it is a sequence to Python's C API, and
`torch.tensor([x.sum()])` would take the length of a 0-dim tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter
from torch.overrides import has_torch_function_unary

from vescale_dtensor._autograd.backward import tensor_backward
from vescale_dtensor._dispatch.registry import scalar_agnostic
from vescale_dtensor._errors import MeshError
from vescale_dtensor._fast_path.keys import NUMBERS, exact_key
from vescale_dtensor._fast_path.lookup import torch_function
from vescale_dtensor._fast_path.tables import table_for_operand
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._tensor.lineage import note_part
from vescale_dtensor._tensor.observers import observers
from vescale_dtensor._torch.compat import dispatch_modes
from vescale_dtensor._torch.untraced import is_compiling

# Method -> the function that torch passes to `__torch_function__` for it, which is in the keys.
_OPERATORS = {
    "__add__": "add",
    "__radd__": "add",
    "__sub__": "sub",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__truediv__": "div",
    "__matmul__": "matmul",
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "div",
    "matmul": "matmul",
    "mm": "mm",
    # Optimizers write hundreds of times a step.
    "add_": "add_",
    "sub_": "sub_",
    "mul_": "mul_",
    "div_": "div_",
}
# Methods of two DTensors and a third, or a number; `value=` or `alpha=` by name.
_OF_THREE = "addcmul_ addcdiv_ lerp_ lerp addmm addcmul addcdiv"
# Methods of one DTensor and of values.
_WITH_VALUES = """
view reshape transpose permute flatten squeeze unsqueeze expand contiguous t chunk narrow
select mean sum pow softmax log_softmax amax amin argmax argmin var std cumsum float double half
bfloat16 neg __neg__ abs square sqrt rsqrt exp log sin cos tanh sigmoid relu clone view_as
"""


_DTENSOR_OR_NUMBER = NUMBERS | {DTensor}
# A default that no caller passes: None is a value.
_LEFT_OUT = object()


def _modes_active() -> bool:
    """Whether an observer, a mode or a compiler has to see every call as one of torch's."""
    # `has_torch_function_unary` of a non-tensor is true only if a TorchFunctionMode is active.
    return bool(observers or has_torch_function_unary(None) or is_compiling() or dispatch_modes())


def _operator(name: str, function: str) -> Callable[..., Any]:
    """A method of two DTensors, or of one and a number.

    Args:
        name: of the method.
        function: name of the function that torch takes it for.
    """
    own, func = getattr(torch.Tensor, name), getattr(torch.Tensor, function)
    reflected = getattr(torch.Tensor, name.replace("__r", "__"))

    def operator(self: DTensor, other: Any = _LEFT_OUT, **named: Any) -> Any:
        # By name (`other=`, `x2=`): torch's parser knows which names there are.
        if other is _LEFT_OUT:
            return own(self, **named)
        # Not for subclasses of users, whose own `__torch_function__` has to be called.
        if named or has_torch_function_unary(None) or type(self) is not DTensor:
            return own(self, other, **named)
        kind = type(other)
        # Observers, tracers and compilers are looked for there.
        if kind is DTensor or (reflected is own and (kind is torch.Tensor or kind is Parameter)):
            return torch_function(DTensor, func, (), (self, other))
        if observers or is_compiling() or dispatch_modes():
            return own(self, other)
        if (kind is float or kind is int) and func in scalar_agnostic:
            compiled = table_for_operand(self).get((func, self._spec, kind))
            if compiled is not None:
                return compiled(self, other)
        if reflected is not own and isinstance(other, torch.Tensor):
            # `plain + dtensor`: Python calls the subclass first, although it is the right operand.
            return reflected(other, self)
        return own(self, other)

    return operator


def _of_three(name: str) -> Callable[..., Any]:
    """A method of two DTensors and a third argument.

    Args:
        name: of the method.
    """
    func = getattr(torch.Tensor, name)

    def method(self: DTensor, *others: Any, **named: Any) -> Any:
        if (
            len(others) == 2
            and type(others[0]) is DTensor is type(self)
            # Tensors of other libraries are found by torch's parser, which lists their classes.
            and type(others[1]) in _DTENSOR_OR_NUMBER
            and not has_torch_function_unary(None)
        ):
            return torch_function(DTensor, func, (), (self, *others), named)
        return func(self, *others, **named)

    return method


def _with_values(name: str) -> Callable[..., Any]:
    """A method of one DTensor and of values that are part of the key.

    Args:
        name: of the method.
    """
    func = getattr(torch.Tensor, name.strip("_"))

    def method(self: DTensor, *values: Any, **named: Any) -> Any:
        if (
            observers
            or has_torch_function_unary(None)
            or is_compiling()
            or dispatch_modes()
            or type(self) is not DTensor
        ):
            return func(self, *values, **named)
        table = table_for_operand(self)
        if not (values or named):
            compiled = table.get((func, self._spec))
            if compiled is not None:
                return compiled(self)
        else:
            if len(values) == 1 and not named and func in scalar_agnostic:
                kind = type(values[0])
                if kind is float or kind is int:
                    compiled = table.get((func, self._spec, kind))
                    if compiled is not None:
                        return compiled(self, values[0])
            # The same key as `lookup._call_with_other` builds: they share their entries.
            key = exact_key(func, self._spec, values, named)
            try:
                compiled = None if key is None else table.exact_keys.get(key)
            except TypeError:  # a list among the values: it does not hash
                compiled = None
        if compiled is None:
            # By torch's parser, which refuses arguments that a rule would not read. Where torch has
            # turned overrides off, the parser would pass the wrapper on to C++.
            if has_torch_function_unary(self):
                return func(self, *values, **named)
            return torch_function(DTensor, func, (), (self, *values), named)
        return compiled(self, *values, **named) if named else compiled(self, *values)

    return method


_detached = _with_values("detach")


def _detach(self: DTensor) -> Any:
    """`Tensor.detach`, of which a write to the result is one to this tensor as well."""
    try:
        result = _detached(self)
    except MeshError:
        if self._spec.layout.inside:
            raise
        # A rank outside of the mesh computes nothing, but it makes parameters as the others do.
        result = wrap(self._local_tensor.detach(), self._spec)
    if type(result) is DTensor:
        # `note_part` of what is trained; of the rest, in a call less.
        if self._local_tensor.requires_grad or self._is_trained_part:
            note_part(result, self)
        else:
            result._part_of = weakref.ref(self)
    return result


def _backward(self: DTensor, *args: Any, **named: Any) -> None:
    """`Tensor.backward` without `__torch_function__`, unless a mode has to see it."""
    seen: Any = torch.Tensor.backward
    (seen if _modes_active() else tensor_backward)(self, *args, **named)


def install() -> None:
    """Give `DTensor` these methods."""
    for name, function in _OPERATORS.items():
        setattr(DTensor, name, _named(_operator(name, function), name))
    for name in _WITH_VALUES.split():
        setattr(DTensor, name, _named(_with_values(name), name))
    for name in _OF_THREE.split():
        setattr(DTensor, name, _named(_of_three(name), name))
    DTensor.detach = _named(_detach, "detach")
    DTensor.backward = _named(_backward, "backward")


def _named(method: Callable[..., Any], name: str) -> Any:
    """Give a method the name and docstring of torch's, for tracebacks and `help`."""
    method.__name__, method.__qualname__ = name, f"DTensor.{name}"
    method.__doc__ = getattr(torch.Tensor, name).__doc__
    return method
