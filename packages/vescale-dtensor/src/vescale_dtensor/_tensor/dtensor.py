"""DTensor: one tensor over many devices. Layouts ride above; autograd runs below, on the locals."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._autograd.leaf_gradient import Leaf
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout import protocol as _protocol
from vescale_dtensor._layout.layout import Layout, Spec, short, spec_of
from vescale_dtensor._layout.placements import Placement
from vescale_dtensor._torch.compat import close_memory, join_foreach, new_wrapper

if TYPE_CHECKING:
    from vescale_dtensor._autograd.redistribution_cache import Remembered
    from vescale_dtensor._autograd.uses import Faces


class DTensor(torch.Tensor):
    """A tensor of global shape, of which every rank holds a piece.

    It behaves as the one tensor that it stands for: every torch function sees global shapes and
    gives global results. Build one with `distribute_tensor` or `DTensor.from_local`.
    """

    # Slots are cheaper to fill and to read than a dict, which most wrappers never need.
    __slots__ = ("_local_tensor", "_spec", "_suspect")

    _local_tensor: Tensor
    _spec: Spec
    # Defaults on the class, so that making a wrapper sets none of them.
    _faces: Faces | None = None
    _leaf: Leaf | None = None
    _gradient_of: weakref.ref[Leaf] | None = None
    _retained: Any = None
    _remembered: Remembered | None = None
    # Whether the local tensor was handed out, and may be written by others.
    _exposed: bool = False
    # The hook that keeps the gradient of an activation, once that is asked for.
    _keeper: Any = None
    _copied_from: Tensor | None = None
    # Refuses a gradient that arrives at the wrapper itself; see `_convert.guarded`.
    _guard: Any = None
    # The node of the custom autograd.Function that made this; see `_bridge`.
    _node: Any = None
    # What a checkpoint kept as its input, and has just handed out; see `_bridge.asked_below`.
    _unpacked: bool = False
    # Made or changed without grad: a custom autograd.Function may have given it a node.
    _suspect: bool

    __new__ = new_wrapper

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the C++ constructor has filled the slots."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse what reached C++ with a wrapper: it would compute on no data at all."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].item()  # where a number is taken: torch.full((2,), x), torch.arange(x)
        if func is torch.ops.aten._to_copy.default and not torch.is_grad_enabled():
            # The engine, where a Function's gradient has another dtype than its operand.
            return args[0].to(**kwargs)
        if all(type(a) is DTensor for a in args[:2]):
            if func is torch.ops.aten.set_.source_Tensor:
                return _become.take_over(args[0], args[1])  # parametrizations do it this way
            if func is torch.ops.aten._has_compatible_shallow_copy_type.default:
                return True  # asked by what takes over
        answer = _bridge.asked_below(func, args)
        if answer is not None:
            return answer
        raise UnsupportedError(
            f"{func} was reached below torch's function overrides with a DTensor in hand (a custom "
            "autograd.Function, a C++ extension, DDP, FSDP, torch.jit, vmap or make_fx). Call it "
            "on x.to_local(), or on x.full_tensor() if it needs the whole; what works with torch's "
            "own DTensors takes x.to_torch()."
        )

    @classmethod
    def from_local(
        cls,
        local_tensor: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[object] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[object] | None = None,
    ) -> DTensor:
        """Wrap this rank's piece of a global tensor. See `vescale_dtensor.from_local`."""
        return _convert.from_local(
            local_tensor,
            device_mesh,
            placements,
            run_check=run_check,
            shape=shape,
            stride=stride,
            grad_placements=grad_placements,
        )

    def to_torch(self) -> torch.distributed.tensor.DTensor:
        """The same tensor as torch's own DTensor; shares the local data, differentiable.

        Raises:
            UnsupportedError: a placement that torch does not have.
        """
        return _torch_interop.to_torch(self)

    @staticmethod
    def from_torch(tensor: Tensor) -> DTensor:
        """A DTensor of torch as one of ours; shares the local data, differentiable.

        Raises:
            UnsupportedError: a placement that we do not have.
        """
        return _torch_interop.from_torch(tensor)

    def to(self, *args: Any, **kwargs: Any) -> DTensor:
        """`torch.Tensor.to`; what asks for nothing is answered here, as clipping asks each norm."""
        if len(args) == 1 and not kwargs:
            wanted = args[0]
            if wanted is self._spec.tensor_meta.dtype:
                return self
            if type(wanted) is torch.device and wanted == self._local_tensor.device:
                return self
        return super().to(*args, **kwargs)  # type: ignore[return-value]

    def to_local(self, *, grad_placements: Sequence[object] | None = None) -> Tensor:
        """This rank's piece, a plain tensor; differentiable.

        Its gradient is taken to lie as the tensor itself does (`Partial` as `Replicate`), unless
        `grad_placements` says otherwise.
        """
        return _convert.to_local(self, grad_placements)

    def full_tensor(self, *, grad_placements: Sequence[object] | None = None) -> Tensor:
        """The whole, a plain tensor on every rank; differentiable. Collective."""
        return _convert.full_tensor(self, grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[object] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same tensor in another layout; differentiable. Collective.

        The result has `forward_dtype`, if given, and so has what is sent; its gradient is sent in
        `backward_dtype` (default: the dtype of this tensor) and arrives in this tensor's dtype.

        Raises:
            LayoutError: placements that do not fit the tensor or the mesh.
            MeshError: a mesh of other ranks than the tensor's.
        """
        return _convert.redistribute_to(
            self,
            device_mesh,
            placements,
            async_op=async_op,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
        )

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh this tensor lies on."""
        return self._spec.layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._spec.layout.placements

    def __vescale_layout__(self) -> _protocol.ShardLayout:
        """Which boxes of the global tensor this rank holds: the vocabulary between packages."""
        return _protocol.shard_layout(
            self._spec.layout, tuple(self._spec.shape), self._local_tensor
        )

    @property
    def _fsdp_orig_uid(self) -> int:
        """What FSDP2 puts on a parameter that it takes over, before it does so: see the setter."""
        raise AttributeError("_fsdp_orig_uid")

    @_fsdp_orig_uid.setter
    def _fsdp_orig_uid(self, value: int) -> None:
        # Otherwise only ranks with a piece of it would go on to what raises, the others hang.
        raise UnsupportedError(
            f"fully_shard of a module that holds {self!r}: FSDP2 shards plain tensors and torch's "
            "own DTensors. Give it x.to_torch(), or x.full_tensor()."
        )

    # Metadata answers for the global tensor, here and not through __torch_function__, which would
    # cost as much as an op.

    shape = property(attrgetter("_spec.shape"))
    dtype = property(attrgetter("_spec.tensor_meta.dtype"))
    ndim = property(attrgetter("_spec.ndim"))
    device = property(attrgetter("_local_tensor.device"))
    layout = property(attrgetter("_local_tensor.layout"))
    is_leaf = property(lambda self: _bridge.is_leaf(self))
    grad_fn = property(lambda self: _bridge.node_of(self))
    is_cpu = property(attrgetter("_local_tensor.is_cpu"))
    is_cuda = property(attrgetter("_local_tensor.is_cuda"))
    is_meta = property(attrgetter("_local_tensor.is_meta"))
    is_sparse = property(attrgetter("_local_tensor.is_sparse"))

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are wanted."""
        if self._suspect:
            return _bridge.wants_gradient(self)
        return self._local_tensor.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property  # type: ignore[override]
    def data(self) -> DTensor:
        """The same values outside of autograd."""
        if not torch.is_grad_enabled():
            _convert.guarded(self)
        # Writes to it are not counted, so nothing may be remembered of this tensor from now on.
        self._exposed, self._remembered = True, None
        return _gradients.follow(self, wrap(self._local_tensor.data, self._spec.itself))

    @data.setter
    def data(self, value: Any) -> None:
        _become.set_data(self, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Short and global; never communicates."""
        spec = self._spec
        grad = ", requires_grad" if self.requires_grad else ""
        return f"DTensor({short(spec.shape, spec.tensor_meta.dtype, spec.layout)}{grad})"

    __str__ = __repr__

    def __format__(self, format_spec: str) -> str:
        """Format a 0-dim tensor as its global value (a collective); others as `repr`."""
        return format(self.item(), format_spec) if self.ndim == 0 and format_spec else repr(self)

    __hash__ = object.__hash__  # by identity, as torch's, which is a function in Python


def wrap(local: Tensor, spec: Spec) -> DTensor:
    """The wrapper of a local tensor; carries its `requires_grad`, so autograd.Function is seen."""
    wrapper: DTensor = new_wrapper(DTensor, local, spec, requires_grad=local.requires_grad)
    close_memory(wrapper)
    wrapper._suspect = not torch.is_grad_enabled()
    return wrapper


def wrap_each(locals_: Sequence[Tensor], specs: Sequence[Spec]) -> list[DTensor]:
    """`wrap` of hundreds: what a foreach function gives."""
    suspect = not torch.is_grad_enabled()
    wrappers = []
    for local, spec in zip(locals_, specs, strict=True):
        wrapper = new_wrapper(DTensor, local, spec, requires_grad=local.requires_grad)
        close_memory(wrapper)
        wrapper._suspect = suspect
        wrappers.append(wrapper)
    return wrappers


def wrap_as(local: Tensor, layout: Layout, shape: Sequence[int]) -> DTensor:
    """The wrapper of a local tensor of this layout and global shape."""
    return wrap(local, spec_of(layout, tuple(shape), local.dtype))


join_foreach(DTensor)

# At the end: these modules need the class, and its methods need them.
from vescale_dtensor._api import torch_interop as _torch_interop
from vescale_dtensor._autograd import conversion as _convert
from vescale_dtensor._autograd import function_bridge as _bridge
from vescale_dtensor._autograd import gradients as _gradients
from vescale_dtensor._autograd import set_data as _become
from vescale_dtensor._fast_path import lookup as _fast
from vescale_dtensor._fast_path import methods as _methods

# Bound once: what a classmethod makes at every call.
DTensor.grad = property(
    _gradients.gradient,
    _gradients.set_gradient,
    lambda self: _gradients.set_gradient(self, None),
    "The gradient: `Partial` on the axes where a sum is still owed. No communication.",
)
DTensor.__torch_function__ = MethodType(_fast.torch_function, DTensor)
_methods.install()
