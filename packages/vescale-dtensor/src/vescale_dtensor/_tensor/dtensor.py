"""The class `DTensor`: its slots, the metadata that it answers from its spec, and its constructors.

Everything that needs more than the wrapper itself (conversion, autograd, dispatch) is defined in
`_api/methods.py` and installed on the class there, since those rooms import this module. There has
to be exactly one class: the fast path tests `type(x) is DTensor` and makes results by its C++
constructor.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.notation import short
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._layout.protocol import ShardLayout, shard_layout
from vescale_dtensor._layout.spec import Spec, spec_of
from vescale_dtensor._tensor.rare_state import NOTHING, RareState
from vescale_dtensor._torch.compat import (
    any_requires_grad,
    close_memory,
    forward_grad_enabled,
    join_foreach,
    new_wrapper,
)


class DTensor(torch.Tensor):
    """A tensor of global shape, of which every rank holds a local tensor.

    It behaves like the single tensor that it stands for: every torch function sees global shapes
    and returns global results. Make one with `distribute_tensor` or `DTensor.from_local`.
    """

    # Slots are cheaper to fill and to read than a dict, which most wrappers never need.
    __slots__ = ("_lineage", "_local_tensor", "_may_have_hidden_node", "_spec")

    _local_tensor: Tensor
    _spec: Spec
    # Which calls made it: see `_tensor/lineage.py`.
    _lineage: int
    # State that higher rooms keep on a wrapper; untyped, since their classes import this one. The
    # defaults are on the class, so that constructing a wrapper sets none of them.
    # `_tensor/state.py` says when which of them is dropped. What few wrappers have is in `_rare`,
    # which `rare_state` gives a wrapper of its own.
    _rare: RareState = NOTHING
    # Aliases for varying uses, outputs of one autograd node: `_autograd.uses.UseAliases`.
    _use_aliases: Any = None
    # Gradient state, once this was used as a leaf: `_autograd.leaf_gradient.LeafGradient`.
    _leaf_gradient: Any = None
    # What lives as long as this leaf: `_autograd.leaf_references.LeafHolds`.
    _leaf_holds: Any = None
    # On a gradient and its views: the state of the leaf it belongs to, and what reduces it with
    # others. Not weak: a gradient that outlives its leaf is reduced on all ranks, or on none.
    _grad_of: tuple[Any, Any] | None = None
    # On `.data` and `.grad` of a tensor: that tensor, of whose lineage a write to this is a part.
    # Weak: it may hold this.
    _part_of: weakref.ref[DTensor] | None = None
    # Whether that was a leaf that wants gradients, or part of one: it may be gone, on this rank.
    _is_trained_part: bool = False
    # The last layout it was redistributed to, a
    # `_autograd.redistribution_cache.CachedRedistribution`.
    _cached_redistribution: Any = None
    # Whether the local tensor was handed out (`to_local`, `.data`), so others may write to it
    # unseen.
    _local_escaped: bool = False
    # On gathered values: what `.data` has handed out of them, and where it was assigned, noted for
    # whoever takes writes back to what is stored. See `_autograd/gathered_parameters.py`.
    _data_uses: list[tuple[int, Tensor | None]] | None = None
    # Set where a view had to be a copy: the local tensor of its base. See
    # `_tensor/copied_views.py`.
    _view_copy_of: Tensor | None = None
    # Raises if a gradient arrives at the wrapper itself: a
    # `_autograd.local_use.StrayGradientGuard`.
    _stray_grad_guard: Any = None
    # Whether this was made or changed in the forward of a custom autograd.Function, after which C++
    # may have given the wrapper a node that the local tensor lacks. Not the only such tensors: see
    # `may_have_hidden_node`.
    _may_have_hidden_node: bool

    __new__ = new_wrapper

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the C++ constructor has filled the slots."""

    def to(self, *args: Any, **kwargs: Any) -> DTensor:
        """`torch.Tensor.to`; calls that change nothing (clipping makes one per norm) end here."""
        if len(args) == 1 and not kwargs:
            # Torch returns the tensor itself in these cases, so no autograd node is missed.
            wanted = args[0]
            if wanted is self._spec.tensor_meta.dtype:
                return self
            if type(wanted) is torch.device and wanted == self._local_tensor.device:
                return self
        return super().to(*args, **kwargs)  # type: ignore[return-value]

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over which this tensor is distributed."""
        return self._spec.layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._spec.layout.placements

    def __vescale_layout__(self) -> ShardLayout:
        """Which boxes of the global tensor this rank owns: the protocol between packages."""
        return shard_layout(self._spec.layout, tuple(self._spec.shape), self._local_tensor)

    @property
    def _fsdp_orig_uid(self) -> int:
        """The attribute that FSDP2 sets on a parameter before it takes it over; see the setter."""
        raise AttributeError("_fsdp_orig_uid")

    @_fsdp_orig_uid.setter
    def _fsdp_orig_uid(self, value: int) -> None:
        # FSDP2 itself fails only later, and only on ranks whose shard is not empty; the others
        # would wait for them for ever. This attribute is set on every rank.
        raise UnsupportedError(
            f"fully_shard of a module that holds {self!r}: FSDP2 shards plain tensors and torch's "
            "own DTensors. Give it x.to_torch(), or x.full_tensor()."
        )

    # Metadata is that of the global tensor. Read by C-level getters and not through
    # `__torch_function__`, which would cost as much as an op.

    shape = property(attrgetter("_spec.shape"))
    dtype = property(attrgetter("_spec.tensor_meta.dtype"))
    ndim = property(attrgetter("_spec.ndim"))
    device = property(attrgetter("_local_tensor.device"))
    layout = property(attrgetter("_local_tensor.layout"))
    is_cpu = property(attrgetter("_local_tensor.is_cpu"))
    is_cuda = property(attrgetter("_local_tensor.is_cuda"))
    is_meta = property(attrgetter("_local_tensor.is_meta"))
    is_sparse = property(attrgetter("_local_tensor.is_sparse"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the short global form; never communicates."""
        spec = self._spec
        grad = ", requires_grad" if self.requires_grad else ""
        return f"DTensor({short(spec.shape, spec.tensor_meta.dtype, spec.layout)}{grad})"

    __str__ = __repr__

    def __format__(self, format_spec: str) -> str:
        """Format a 0-dim tensor as its global value (collective); others as `repr`."""
        return format(self.item(), format_spec) if self.ndim == 0 and format_spec else repr(self)

    __hash__ = object.__hash__  # by identity, as torch's, which is a function in Python

    if TYPE_CHECKING:
        # Installed on the class by `_api/methods.py`, which documents them; declared for type
        # checkers.

        def _attach_function_node(self) -> None: ...

        @classmethod
        def from_local(
            cls,
            local_tensor: Tensor,
            device_mesh: DeviceMesh | None = None,
            placements: Sequence[object] | None = None,
            *,
            run_check: bool | Literal["sampled"] = False,
            shape: Sequence[int] | None = None,
            stride: Sequence[int] | None = None,
            grad_placements: Sequence[object] | None = None,
        ) -> DTensor: ...

        def to_local(self, *, grad_placements: Sequence[object] | None = None) -> Tensor: ...

        def full_tensor(self, *, grad_placements: Sequence[object] | None = None) -> Tensor: ...

        def redistribute(
            self,
            device_mesh: DeviceMesh | None = None,
            placements: Sequence[object] | None = None,
            *,
            async_op: bool = False,
            forward_dtype: torch.dtype | None = None,
            backward_dtype: torch.dtype | None = None,
        ) -> DTensor: ...

        def to_torch(self) -> torch.distributed.tensor.DTensor: ...

        @staticmethod
        def from_torch(tensor: Tensor) -> DTensor: ...


def may_have_hidden_node(tensor: DTensor) -> bool:
    """Whether C++ may have given the wrapper an autograd node that its local tensor lacks.

    A custom autograd.Function may return any tensor, also one that its forward did not touch, and
    C++ tells nobody. Only its flag shows it, which is else that of the local tensor. It is not
    looked for where the local tensor has a history: see docs/limits.md.
    """
    return tensor._may_have_hidden_node or (
        not tensor._local_tensor.requires_grad and any_requires_grad(tensor)
    )


def wrap(local: Tensor, spec: Spec) -> DTensor:
    """Return the wrapper of a local tensor.

    It carries the local tensor's `requires_grad`, so that a custom autograd.Function, which only
    C++ sees, records it.
    """
    wrapper: DTensor = new_wrapper(DTensor, local, spec, local.requires_grad)
    # The wrapper's storage is null: C++ code that asks for its address has to raise, not crash.
    close_memory(wrapper)
    # `Function.apply` attaches its node after forward, unseen. Forward mode is off in forward, also
    # where it enables grad by itself. Anything else is not checked for a node, as that costs about
    # as much as an op.
    wrapper._may_have_hidden_node = not forward_grad_enabled()
    wrapper._lineage = 0
    return wrapper


def wrap_each(locals_: Sequence[Tensor], specs: Sequence[Spec]) -> list[DTensor]:
    """Return the wrappers of many local tensors: `wrap`, but for results of foreach functions."""
    # Inlined and asked once: there are hundreds, and a call each would show.
    may_have_hidden_node = not forward_grad_enabled()
    wrappers = []
    for local, spec in zip(locals_, specs, strict=True):
        wrapper = new_wrapper(DTensor, local, spec, local.requires_grad)
        close_memory(wrapper)
        wrapper._may_have_hidden_node = may_have_hidden_node
        wrapper._lineage = 0
        wrappers.append(wrapper)
    return wrappers


def wrap_as(local: Tensor, layout: Layout, shape: Sequence[int]) -> DTensor:
    """Return the wrapper of a local tensor, for this layout and global shape."""
    return wrap(local, spec_of(layout, tuple(shape), local.dtype))


# The one side effect of importing this package; see `join_foreach`.
join_foreach(DTensor)
