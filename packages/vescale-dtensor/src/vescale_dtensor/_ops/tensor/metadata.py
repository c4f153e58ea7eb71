"""Functions that ask about a tensor, and those that start or observe a backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd import backward as backward_pass
from vescale_dtensor._autograd import hooks
from vescale_dtensor._autograd.local_use import join_hidden_node, leaf_gradient_of
from vescale_dtensor._autograd.set_data import set_requires_grad
from vescale_dtensor._ops.common.functions import entries, functions, getter, setter
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._tensor.state import history_replaced
from vescale_dtensor._torch.compat import detach_own, no_torch_function, without_overrides

# The wrapper's own C++ metadata is global and true: shape, strides, dtype, device.
_METADATA = """
size dim ndimension numel nelement stride is_contiguous element_size is_floating_point is_complex
is_signed get_device is_inference is_conj is_neg is_coalesced has_names dim_order
is_set_to dense_dim sparse_dim is_nonzero_ nbytes_ __len__ __hash__ type_ _is_view
"""
_GETTERS = """
is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse
is_sparse_csr is_vulkan is_xla is_xpu itemsize layout name nbytes ndim shape dtype device
"""


def _of_wrapper(func: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        with without_overrides():
            return func(*args, **kwargs)

    return ask


def _of_local(name: str) -> Callable[[DTensor], Any]:
    def ask(self: DTensor) -> Any:
        return getattr(self._local_tensor, name)

    return ask


def _result_type(*args: Any, **kwargs: Any) -> torch.dtype:
    given = (*args, *kwargs.values())
    return torch.result_type(*[a._local_tensor if isinstance(a, DTensor) else a for a in given])


def _is_same_size(self: Tensor, other: Tensor) -> bool:
    return self.shape == other.shape


def _deepcopy(self: DTensor, memo: dict[int, Any]) -> DTensor:
    """A deep copy: data, requires_grad and being a Parameter, and the gradient if it is none."""
    known = memo.get(id(self))
    if known is not None:
        return known  # type: ignore[no-any-return]
    if torch.is_grad_enabled():
        join_hidden_node(self)  # the output of a Function is no leaf, which torch refuses to copy
    result = wrap(_copied_local(self, memo), self._spec.base)
    memo[id(self)] = result
    for name, value in self.__dict__.items():
        # Not its graph, nor whose view it is: these are of this one alone.
        if name not in DTensor.__annotations__:
            setattr(result, name, copy.deepcopy(value, memo))
    if isinstance(self, torch.nn.Parameter):
        return result
    if self._leaf_gradient is not None and result._local_tensor.is_leaf:
        leaf = leaf_gradient_of(result)
        leaf.note_partial(self._leaf_gradient.partial)
        if self._leaf_gradient.is_reduced:
            leaf.assign_total()
    return result


def _copied_local(tensor: DTensor, memo: dict[int, Any]) -> Tensor:
    local = tensor._local_tensor
    if not isinstance(tensor, torch.nn.Parameter) or local.grad is None:
        return copy.deepcopy(local, memo)
    # A copy of a parameter has none, as torch's own, and not a `grad_dtype` that one would fit.
    gradient, local.grad = local.grad, None
    try:
        return copy.deepcopy(local, memo)
    finally:
        local.grad = gradient


def _detach_(self: DTensor) -> DTensor:
    self._local_tensor.detach_()
    # A custom Function's node is on the wrapper, if the tensor was not used yet, or shown for it.
    detach_own(self)
    if self._rare.function_node is not None:
        self._rare.function_node = None
    history_replaced(self)
    return self


def _module_load(self: DTensor, other: Tensor, assign: bool = False) -> Tensor:
    """`Tensor.module_load`, which the fallback would hand out replicated."""
    loaded = other if assign else self.copy_(other)
    return loaded.detach()


def _pinned(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """`Tensor.pin_memory`, of the local tensor."""
    return wrap(self._local_tensor.pin_memory(*args, **kwargs), self._spec)


def _is_pinned(self: DTensor, *args: Any, **kwargs: Any) -> bool:
    return bool(self._local_tensor.is_pinned(*args, **kwargs))


def _compatible(first: Tensor, second: Tensor) -> bool:
    """Whether `.data` of one can be set to the other; asked of local tensors."""
    pair = [t._local_tensor if isinstance(t, DTensor) else t for t in (first, second)]
    return isinstance(first, DTensor) == isinstance(second, DTensor) and bool(
        torch._has_compatible_shallow_copy_type(*pair)
    )


def _gradient_dtype(self: DTensor) -> Any:
    """`Tensor.grad_dtype`: that of the local leaf, whose `.grad` this one's is."""
    return _leaf_of(self).grad_dtype


def _set_gradient_dtype(self: DTensor, dtype: Any) -> None:
    _leaf_of(self).grad_dtype = dtype


def _leaf_of(tensor: DTensor) -> Any:
    if torch.is_grad_enabled():
        join_hidden_node(tensor)  # a Function's output is no leaf, which torch refuses
    return tensor._local_tensor


def _type(self: DTensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    if dtype is None:
        return self._local_tensor.type()
    if not isinstance(dtype, torch.dtype):
        # A type or its name ("torch.DoubleTensor") states a device, too: torch reads it.
        with no_torch_function():
            typed: Any = torch.empty(0, dtype=self.dtype, device=self.device).type(dtype)
        if typed.device != self.device:
            return self.to(typed.device, typed.dtype, non_blocking=non_blocking)
        dtype = typed.dtype
    return self.to(dtype)


_CONSTANTS = """
dim ndimension numel nelement is_floating_point is_complex is_signed element_size size itemsize
"""
CONSTANT = frozenset(
    {*functions(_CONSTANTS, (torch.Tensor, torch)), getter("itemsize"), getter("nbytes")}
)
"""What depends on the shape and the dtype alone."""

HANDLERS: dict[Any, Callable[..., Any]] = {
    **{func: _of_wrapper(func) for func in functions(_METADATA, (torch.Tensor, torch))},
    **{
        getter(name): _of_wrapper(getter(name))
        for name in _GETTERS.split()
        if hasattr(torch.Tensor, name)
    },
    **{getter(name): _of_local(name) for name in ("_version", "output_nr")},
    **entries("is_same_size", _is_same_size, (torch.Tensor, torch)),
    getter("is_leaf"): lambda self: self.is_leaf,
    getter("requires_grad"): lambda self: self.requires_grad,
    getter("retains_grad"): lambda self: self._rare.retain_grad_hook is not None,
    getter("grad_fn"): lambda self: self.grad_fn,
    # C++ drops the hooks of what a custom Function wrote to (`mark_dirty`), before `apply` returns.
    setter("_backward_hooks"): _of_wrapper(setter("_backward_hooks")),
    getter("grad_dtype"): _gradient_dtype,
    setter("grad_dtype"): _set_gradient_dtype,
    torch.result_type: _result_type,
    torch.Tensor.type: _type,
    torch.Tensor.pin_memory: _pinned,
    torch.Tensor.is_pinned: _is_pinned,
    torch.Tensor.module_load: _module_load,
    torch._has_compatible_shallow_copy_type: _compatible,
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.Tensor.detach_: _detach_,
    torch.Tensor.backward: backward_pass.tensor_backward,
    torch.autograd.backward: backward_pass.backward,
    torch.autograd.grad: backward_pass.grad,
    torch.Tensor.register_hook: hooks.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook: (hooks.register_post_accumulate_grad_hook),
    torch.Tensor.retain_grad: hooks.retain_grad,
    torch.Tensor.requires_grad_: set_requires_grad,
}
