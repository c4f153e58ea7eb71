"""Methods and properties of `DTensor` that need more than the wrapper itself.

`install` puts them on the class, once, when the package is imported. They are defined here and not
in the class, because what they call imports the class (see `_tensor/dtensor.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._api import checkpointing, torch_interop
from vescale_dtensor._autograd import conversion, function_bridge, grad_property, set_data
from vescale_dtensor._autograd.function_results import note_plain
from vescale_dtensor._autograd.local_use import local_outside_autograd
from vescale_dtensor._autograd.redistribute import redistribute_to
from vescale_dtensor._dispatch.dispatch import refuse_raw_communication
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._fast_path import lookup
from vescale_dtensor._fast_path import methods as fast_methods
from vescale_dtensor._tensor.copied_views import mark_alias
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._tensor.lineage import note_part, pause
from vescale_dtensor._tensor.observers import notify_to_local, observers
from vescale_dtensor._tensor.rare_state import rare_state
from vescale_dtensor._tensor.state import local_escaped
from vescale_dtensor._torch.call_site import call_site, integration
from vescale_dtensor._torch.compat import (
    any_requires_grad,
    compiler_callback,
    dispatch_modes,
)
from vescale_dtensor._torch.transforms import is_transformed
from vescale_dtensor._torch.untraced import eagerly, is_compiled, is_compiling, untraced

is_grad_enabled = torch.is_grad_enabled


def torch_dispatch(
    cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """Refuse an op that reached C++ with a wrapper, which has no data to compute on.

    A few calls that torch makes there on purpose are answered: reading a number, casts of the
    autograd engine, `set_`, what custom Functions and checkpoints ask for, and constructors.

    Raises:
        UnsupportedError: any other op.
    """
    if func is torch.ops.aten._local_scalar_dense.default:
        # An argument that torch reads as a number, in torch.full((2,), x) or torch.arange(x).
        return args[0].item()
    if func is torch.ops.aten._to_copy.default and not torch.is_grad_enabled():
        # The engine casts a Function's gradient whose dtype is not that of its operand.
        return args[0].to(**_to_arguments(kwargs))
    if all(type(a) is DTensor for a in args[:2]):
        if func is torch.ops.aten.set_.source_Tensor:
            return set_data.set_(args[0], args[1])  # torch.nn.utils.parametrize assigns so
        if func is torch.ops.aten._has_compatible_shallow_copy_type.default:
            return True  # asked by nn.Module._apply before it assigns `.data`
    answer = function_bridge.answer_below_overrides(func, args)
    if answer is None:
        answer = _copied(func, args, kwargs or {})
    if answer is not None:
        return answer
    refuse_raw_communication(func)
    raise UnsupportedError(
        f"{func} was reached from {call_site()} below torch's function overrides with a DTensor in "
        "hand (a custom autograd.Function, a C++ extension, DDP, FSDP, torch.jit, vmap or make_fx)."
        " Call it on x.to_local(), or on x.full_tensor() if it needs the whole; what works with "
        f"torch's own DTensors takes x.to_torch().{integration()}"
    )


def _to_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `_to_copy` that `Tensor.to` takes; DTensors have no others."""
    return {name: value for name, value in kwargs.items() if name in _TAKEN_OVER}


_TAKEN_OVER = frozenset(["dtype", "device", "memory_format", "non_blocking"])


def _copied(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> DTensor | None:
    """Answer what constructors do to a tensor argument: torch.tensor(x), torch.Tensor(x).

    Returns:
        The copy or alias; None if this is another op, or if some mode or transform runs it.
    """
    source = args[0] if args else None
    if not isinstance(source, DTensor) or dispatch_modes() or is_transformed(source._local_tensor):
        return None
    # Without history: below autograd, local tensors would record none. C++ records it on the
    # wrapper; at the first use that graph is joined to the local tensors', as for a custom
    # Function.
    copy = wrap(source._local_tensor.detach(), source._spec.base)
    if func is torch.ops.aten._to_copy.default:
        copy = copy.to(copy=True, **_to_arguments(kwargs))
    elif func not in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        return None
    # torch.tensor(x, requires_grad=True) sets only the flag in C++, which is read at the first use.
    copy._may_have_hidden_node = rare_state(copy).from_checkpoint = True
    return copy


def from_local(
    cls: type[DTensor],
    local_tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[object] | None = None,
    *,
    run_check: bool | Literal["sampled"] = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: Sequence[object] | None = None,
) -> DTensor:
    convert: Callable[..., DTensor] = conversion.from_local
    if is_compiled():
        convert = functools.partial(eagerly, convert)
    return convert(
        local_tensor,
        device_mesh,
        placements,
        run_check=run_check,
        shape=shape,
        stride=stride,
        grad_placements=grad_placements,
    )


from_local.__doc__ = conversion.from_local.__doc__


def to_local(self: DTensor, *, grad_placements: Sequence[object] | None = None) -> Tensor:
    """Return this rank's local tensor, a plain tensor; differentiable.

    Its gradient is taken to have the layout of the tensor itself (`Replicate` where this is
    `Partial`), unless `grad_placements` says otherwise.
    """
    # `is_compiled` written out.
    if is_compiling() or compiler_callback() is not None:
        return eagerly(to_local, self, grad_placements=grad_placements)
    if observers:
        notify_to_local(self)
    if not is_grad_enabled():
        layout = self._spec.layout
        note_plain(shard=layout.replicated != layout.active)
    elif grad_placements is None and not self._may_have_hidden_node:
        local = self._local_tensor
        # Of a hidden node, too: see `may_have_hidden_node`.
        if not any_requires_grad(local, self):
            # `conversion.to_local` written out where autograd has nothing to type.
            if not self._local_escaped or self._cached_redistribution is not None:
                local_escaped(self)
            return local
    return conversion.to_local(self, grad_placements)


@untraced
def full_tensor(self: DTensor, *, grad_placements: Sequence[object] | None = None) -> Tensor:
    """Return the global tensor, as a plain tensor on every rank; differentiable. Collective."""
    note_plain()
    return conversion.full_tensor(self, grad_placements)


def redistribute(
    self: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[object] | None = None,
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """Return the same tensor in another layout; differentiable. Collective.

    `async_op` changes nothing: a DTensor is always ready to be used, so the result is waited for
    here (on CUDA by the stream, and not by the process).

    The result has `forward_dtype`, if given, and is sent in it; its gradient is sent in
    `backward_dtype` (default: the dtype of this tensor) and arrives in this tensor's dtype.

    Raises:
        LayoutError: placements that do not fit the tensor or the mesh.
        MeshError: a mesh of other ranks than the tensor's.
    """
    # `is_compiled` written out.
    if is_compiling() or compiler_callback() is not None:
        return eagerly(
            redistribute_to, self, device_mesh, placements, forward_dtype, backward_dtype
        )
    return redistribute_to(self, device_mesh, placements, forward_dtype, backward_dtype)


@untraced
def to_torch(self: DTensor) -> torch.distributed.tensor.DTensor:
    """Return the same tensor as torch's own DTensor; shares the local data, differentiable.

    The gradient of a leaf (`p.grad.to_torch()`) is reduced first, which is a collective, and holds
    the total from then on: torch's DTensor could not follow a change of its layout.

    Raises:
        UnsupportedError: a placement that torch does not have.
    """
    return torch_interop.to_torch(self)


@untraced
def from_torch(tensor: Tensor) -> DTensor:
    """Return a DTensor of torch as one of ours; shares the local data, differentiable.

    Raises:
        LayoutError: not a DTensor of torch.
        UnsupportedError: a placement that we do not have.
    """
    return torch_interop.from_torch(tensor)


def _get_requires_grad(self: DTensor) -> bool:
    # C++ may know better than the local tensor: a custom Function's output is not joined to the
    # local graph before its first use.
    # `may_have_hidden_node` written out, and the local tensor asked once.
    wanted = self._local_tensor.requires_grad
    if self._may_have_hidden_node or (not wanted and any_requires_grad(self)):
        return function_bridge.wants_gradient(self)
    return wanted


def _set_requires_grad(self: DTensor, value: bool) -> None:
    self.requires_grad_(value)


def _get_data(self: DTensor) -> DTensor:
    # This may be the forward of a custom Function; see `local_outside_autograd`.
    if not torch.is_grad_enabled():
        local_outside_autograd(self)
    # torch does not count writes through `.data` in this tensor's version, so no redistribution of
    # it may be cached from now on.
    local_escaped(self)
    local = self._local_tensor
    if self._data_uses is None:
        data = wrap(local.data, self._spec.base)
    elif pause.depth:
        # A replay does not come here: of writes in it the version of the values themselves tells.
        data = wrap(local.detach(), self._spec.base)
    else:
        data = wrap(local.data, self._spec.base)
        self._data_uses.append((id(self), data._local_tensor))
    note_part(data, self)
    if self._view_copy_of is not None:
        mark_alias(data, self)
    return grad_property.track_gradient_view(self, data)


def _drop_gradient(self: DTensor) -> None:
    grad_property.set_gradient(self, None)


def _copy(self: DTensor) -> DTensor:
    """`copy.copy`: another tensor of the same memory, a leaf of its own."""
    made: Any = self.detach()
    for name, value in self.__dict__.items():
        if not hasattr(DTensor, name):  # the class has defaults of all that is this very tensor's
            setattr(made, name, value)
    return made.requires_grad_(self.requires_grad)  # type: ignore[no-any-return]


def _part_of_complex(name: str) -> property:
    """`x.real`, `x.imag`: torch's setters ask no override, and write to the wrapper itself."""
    of_torch: Any = getattr(torch.Tensor, name)

    def get(self: DTensor) -> Tensor:
        return of_torch.__get__(self)  # type: ignore[no-any-return]

    def write(self: DTensor, value: Any) -> None:
        part = get(self)
        part.copy_(
            value
            if isinstance(value, Tensor)
            else torch.tensor(value, dtype=part.dtype, device=part.device)
        )

    return property(get, write, doc=f"`Tensor.{name}`.")


_METHODS = (to_local, full_tensor, redistribute, to_torch)
_PROPERTIES: dict[str, property] = {
    "data": property(_get_data, set_data.set_data, doc="The same values outside of autograd."),
    "grad": property(
        grad_property.gradient,
        grad_property.set_gradient,
        _drop_gradient,
        "The gradient: `Partial` on the axes where a sum is still owed. No communication.",
    ),
    "grad_fn": property(function_bridge.node_of, doc="The autograd node that made this tensor."),
    "is_leaf": property(function_bridge.is_leaf, doc="Whether no recorded operation made this."),
    "real": _part_of_complex("real"),
    "imag": _part_of_complex("imag"),
    "requires_grad": property(
        _get_requires_grad, _set_requires_grad, doc="Whether gradients are wanted."
    ),
}


def install() -> None:
    """Install all of this on the class `DTensor`."""
    for method in _METHODS:
        method.__qualname__ = f"DTensor.{method.__name__}"
        setattr(DTensor, method.__name__, method)
    for name, member in [*_PROPERTIES.items(), *checkpointing.METHODS.items()]:
        setattr(DTensor, name, member)
    from_local.__qualname__ = "DTensor.from_local"
    own: Any = DTensor
    own.from_local = classmethod(from_local)
    own.from_torch = staticmethod(from_torch)
    own.__copy__ = _copy
    own._attach_function_node = function_bridge.bridge
    # Assigned after the class was made, so that defining the class imports none of this.
    own.__torch_dispatch__ = classmethod(torch_dispatch)
    # Bound once: a classmethod would make a bound method at every call of every function.
    own.__torch_function__ = MethodType(lookup.torch_function, DTensor)
    fast_methods.install()
