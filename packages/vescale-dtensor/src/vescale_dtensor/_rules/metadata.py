"""Functions that only ask about a tensor, and those that start or watch a backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from vescale_dtensor import _gradients
from vescale_dtensor._rules._names import functions, getter
from vescale_dtensor._tensor import DTensor, wrap
from vescale_dtensor._torch_compat import without_overrides

# The wrapper's own C++ metadata is global and true: shape, strides, dtype, device.
_METADATA = """
size dim ndimension numel nelement stride is_contiguous element_size is_floating_point is_complex
is_signed get_device is_same_size is_inference is_conj is_neg is_coalesced has_names dim_order
is_set_to storage_offset dense_dim sparse_dim is_nonzero_ nbytes_ __len__ __hash__ type_ _is_view
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


def _result_type(*args: Any) -> torch.dtype:
    return torch.result_type(*[a._local_tensor if isinstance(a, DTensor) else a for a in args])


def _deepcopy(self: DTensor, memo: dict[int, Any]) -> DTensor:
    """A deep copy: data, requires_grad, gradient, and being a Parameter."""
    known = memo.get(id(self))
    if known is not None:
        return known  # type: ignore[no-any-return]
    result = wrap(copy.deepcopy(self._local_tensor, memo), self._spec.itself)
    memo[id(self)] = result
    for name, value in self.__dict__.items():
        if name not in ("_local_tensor", "_spec", "_faces", "_leaf", "_gradient_of", "_remembered"):
            setattr(result, name, copy.deepcopy(value, memo))
    if self._leaf is not None and result._local_tensor.is_leaf:
        from vescale_dtensor._convert import leaf_of

        leaf = leaf_of(result)
        leaf.partial = self._leaf.partial
        if self._leaf.settled:
            leaf.replaced()
    return result


def _detach_(self: DTensor) -> DTensor:
    self._local_tensor.detach_()
    self._faces = None
    return self


def _type(self: DTensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    return self._local_tensor.type() if dtype is None else self.to(dtype)


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
    **{
        getter(name): _of_local(name)
        for name in ("_version", "output_nr", "is_leaf", "requires_grad", "retains_grad", "grad_fn")
    },
    torch.result_type: _result_type,
    torch.Tensor.type: _type,
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.Tensor.detach_: _detach_,
    torch.Tensor.backward: _gradients.tensor_backward,
    torch.autograd.backward: _gradients.backward,
    torch.autograd.grad: _gradients.grad,
    torch.Tensor.register_hook: _gradients.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook: (
        _gradients.register_post_accumulate_grad_hook
    ),
    torch.Tensor.retain_grad: _gradients.retain_grad,
    torch.Tensor.requires_grad_: _gradients.set_requires_grad,
}
