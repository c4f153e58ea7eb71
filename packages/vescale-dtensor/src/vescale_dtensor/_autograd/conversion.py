"""Into and out of DTensors, and from one layout to another; all of it differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._autograd.cotangent import cotangent_layout
from vescale_dtensor._autograd.leaf_gradient import Leaf, leaf_face
from vescale_dtensor._autograd.local_aliases import alias_of_leaf, counted_once
from vescale_dtensor._autograd.prepared import one_mesh, prepared
from vescale_dtensor._autograd.uses import (
    Faces,
    hub_faces,
    make_hub,
)
from vescale_dtensor._errors import LayoutError, UnsupportedError
from vescale_dtensor._layout.layout import (
    ById,
    Layout,
    Spec,
    local_shape,
    normalized,
    order_of,
    spec_of,
)
from vescale_dtensor._layout.mesh import current_mesh, describe
from vescale_dtensor._layout.placements import Partial, Replicate, as_placement, is_flat
from vescale_dtensor._redistribute.execute import run
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._tensor.observers import tell_move, watchers
from vescale_dtensor._tensor.state import local_escaped
from vescale_dtensor._torch.bounded_cache import BoundedCache
from vescale_dtensor._torch.compat import hook_own_gradient, is_transformed, materialized


def leaf_of(tensor: DTensor) -> Leaf:
    """The gradient state of a leaf wrapper, made at its first use."""
    leaf: Leaf | None = tensor._leaf
    if leaf is None or leaf.local() is not tensor._local_tensor:
        leaf = tensor._leaf = Leaf(tensor._local_tensor, tensor._spec.layout)
    return leaf


def face(tensor: DTensor, varying: int) -> Tensor:
    """The local data as an op uses it that varies on the axes of the mask `varying`.

    Args:
        tensor: the tensor used.
        varying: mask of replicated, active axes on which the op varies.
    """
    if not torch.is_grad_enabled():
        return guarded(tensor)
    join_hidden_node(tensor)
    return used(tensor, varying)


def used(tensor: DTensor, varying: int) -> Tensor:
    """`face` in grad mode, of a tensor that is known to have no node of its own."""
    local = tensor._local_tensor
    if not local.requires_grad:
        return local
    # A leaf has no hub: its terms add up in `.grad` itself, and the sum is taken when it is read.
    if local.is_leaf:
        leaf = leaf_of(tensor)
        noted = not varying & ~leaf.partial and not leaf.layout.replicated & ~varying
        if noted and leaf.average == 1:
            return local  # what `leaf_face` comes to when it has nothing to note
        return leaf_face(leaf, local, varying, tuple(tensor._spec.shape))
    if not varying:
        return local
    faces: Faces | None = tensor._faces
    # One hub for all uses, so that backward sends once for all of them.
    if faces is None or not faces.current(local):
        faces = tensor._faces = hub_faces(local, tensor._spec.layout, tensor._spec.shape, varying)
    known = faces.by_mask.get(varying)
    if known is None:
        more = hub_faces(local, tensor._spec.layout, tensor._spec.shape, varying)
        known = faces.by_mask[varying] = more.by_mask[varying]
    return known


def join_hidden_node(tensor: DTensor) -> None:
    """Notice what a custom autograd.Function returned: its node hangs on the wrapper.

    See `_bridge`.

    Raises:
        UnsupportedError: the Function had inputs that no bridge leads to.
    """
    if tensor._suspect:
        tensor._attach_function_node()


def guarded(tensor: DTensor) -> Tensor:
    """The local data, for a use that autograd does not record.

    The forward of a custom autograd.Function is such a use. What it returns as a plain tensor hangs
    on the wrapper and not on the local, so the gradient would end there, unseen. No other way leads
    a gradient to a wrapper, so its arrival is made an error, at the first use without grad.
    """
    local = tensor._local_tensor
    if local.requires_grad and tensor._guard is None:
        tensor._guard = Guard(repr(tensor))
        hook_own_gradient(tensor, tensor._guard)
    return local


class Guard:
    """Refuses a gradient that arrives at a wrapper, unless a bridge waits for it (`expected`)."""

    __slots__ = ("expected", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.expected = 0

    def __call__(self, _: Tensor) -> None:
        """The hook on the wrapper."""
        if not self.expected:
            raise UnsupportedError(
                f"{self.what} went into a custom autograd.Function that returned plain tensors: "
                "its gradient would not reach the local data. Call the Function on x.to_local()."
            )


def redistributed(
    tensor: DTensor, target: Layout, backward_dtype: torch.dtype | None = None
) -> DTensor:
    """The tensor in the target layout (its memory order is kept). Collective, differentiable.

    Its gradient is sent in `backward_dtype`; default: in the tensor's dtype.
    """
    if torch.is_grad_enabled():
        join_hidden_node(tensor)
    else:
        guarded(tensor)
    source = tensor._spec.layout
    if _lies_as(source, target):
        return tensor
    # A gradient that owes a sum is not moved as it is: its total is taken and kept, so the next
    # op finds it, and torch's accumulation goes on from there.
    owner = None if tensor._gradient_of is None else tensor._gradient_of()
    if owner is not None and source.partial and not tensor._local_tensor.requires_grad:
        owner.settle()
        source = tensor._spec.layout
        if _lies_as(source, target):
            return tensor
    local = tensor._local_tensor
    move = prepared(tensor._spec.itself, target)
    if watchers:
        tell_move(move.plan)
    if not (local.requires_grad and torch.is_grad_enabled()):
        return wrap(run(move.plan, materialized(local.detach())), move.spec)
    # The data moves outside of autograd; the hub that follows is the node of this move, so its
    # backward sees the cotangents of all faces at once, and sends them back in one collective.
    entry, owed = move.typed(local.is_leaf, backward_dtype)
    with torch.no_grad():
        data = run(move.plan, materialized(local.detach()))
    shape = move.plan.shape
    outputs = make_hub(face(tensor, entry), data, move.masks, owed, shape)
    result = wrap(outputs[0], move.spec)
    # The first face is the tensor itself: whoever uses the local uses a face, too.
    result._faces = Faces(outputs[0], dict(zip(move.masks, outputs, strict=True)))
    return result


def _lies_as(source: Layout, target: Layout) -> bool:
    return source.placements == target.placements and one_mesh(source, target)


def redistribute_to(
    tensor: DTensor,
    device_mesh: DeviceMesh | None,
    placements: Sequence[object] | None,
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """See `DTensor.redistribute`."""
    mesh = tensor._spec.layout.mesh
    if device_mesh is not None and device_mesh != mesh:
        mesh = device_mesh
    if placements is None:
        raise LayoutError(
            f"redistribute of {tensor!r}: give placements, one per axis of {describe(mesh)}"
        )
    if async_op:
        raise UnsupportedError(
            f"redistribute(async_op=True) of {tensor!r}: a DTensor is always ready to be used. "
            "Leave async_op out, or call collectives of your own on x.to_local()."
        )
    target = _target(ById(mesh), tuple(placements), tensor._spec.ndim)
    if forward_dtype is backward_dtype is None:
        return redistributed(tensor, target)
    wire = backward_dtype or tensor.dtype
    if forward_dtype is not None:
        tensor = tensor.to(forward_dtype)
    return redistributed(tensor, target, None if wire == tensor.dtype else wire)


@lru_cache(maxsize=4096)
def _target(mesh: ById, placements: tuple[object, ...], ndim: int) -> Layout:
    return Layout.of(mesh.mesh, normalized(placements, ndim))


# What `from_local` made of a mesh, placements, and a local tensor's shape and dtype.
_even_specs: BoundedCache[tuple[object, ...], Spec] = BoundedCache(8192)


def from_local(
    local_tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[object] | None = None,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: Sequence[object] | None = None,
) -> DTensor:
    """Wrap this rank's piece of a global tensor; gradients flow back to it, complete.

    Args:
        local_tensor: this rank's piece. It is aliased, and never changed.
        device_mesh: the mesh. Default: that of the enclosing `with mesh:`.
        placements: one per mesh axis; default: replicated everywhere.
        run_check: compare shapes over ranks (a collective); with explicit `shape` there is none.
        shape: global shape. Default: sharded dims are local extent times axis size, which holds
            for even shards only, and for no dims that are cut as one.
        stride: global strides, where the tensor is not row-major on one device.
        grad_placements: how the gradient that `local_tensor` gets lies. Default: as the tensor
            (`Partial` as `Replicate`); `Partial()` instead of `Replicate()` gives it on
            coordinate 0 of the axis, and zeros elsewhere.

    Raises:
        LayoutError: a local shape that is not what the layout gives this rank.
    """
    key = None
    if shape is stride is grad_placements is None and placements is not None:
        key = (id(device_mesh), *placements, local_tensor.shape, local_tensor.dtype)
        spec = _even_specs.get(key)
        # The spec keeps its mesh alive, so that no other one can have its id.
        if spec is not None and type(local_tensor) is not DTensor:
            return wrap(_alias(local_tensor), spec)
    if isinstance(local_tensor, DTensor):
        raise LayoutError(
            f"from_local needs a plain tensor, found {local_tensor!r}; use its redistribute()"
        )
    mesh = device_mesh if device_mesh is not None else current_mesh("from_local")
    wanted = placements if placements is not None else [Replicate()] * mesh.ndim
    if shape is None and any(is_flat(as_placement(p)) for p in wanted):
        raise LayoutError(
            f"from_local: {list(wanted)} lies flat in the local tensor, which does not tell the "
            "global shape. Pass it as shape=."
        )
    ndim = local_tensor.ndim if shape is None else len(shape)
    layout = Layout.of(mesh, normalized(wanted, ndim))
    global_shape = tuple(shape) if shape is not None else _even_shape(local_tensor, layout)
    if stride is not None:
        layout = layout.with_order(order_of(global_shape, tuple(stride)))
    expected = local_shape(layout, global_shape)
    if tuple(local_tensor.shape) != expected:
        raise LayoutError(
            f"from_local: {layout} of global shape {global_shape} gives this rank the shape "
            f"{expected}, found {tuple(local_tensor.shape)}. Pass the true global shape=."
        )
    local = _alias(local_tensor)
    if grad_placements is not None:
        axes = _terms("from_local", layout, grad_placements)
        local = counted_once(local, layout, axes, global_shape)
    spec = spec_of(layout, global_shape, local_tensor.dtype)
    if key is not None and device_mesh is not None:
        _even_specs.store(key, spec)
    return wrap(local, spec)


def _alias(tensor: Tensor) -> Tensor:
    """The caller's data in a tensor of our own: its leaf gets a complete gradient, not a term."""
    refuse_transformed(tensor)
    # Always another tensor object: `requires_grad_()` and `.grad` of ours are not the caller's.
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor.detach()
    return alias_of_leaf(tensor) if tensor.is_leaf else tensor


def refuse_transformed(tensor: Tensor) -> None:
    """Notice a plain tensor of vmap, torch.func.grad or forward mode among DTensors.

    Raises:
        UnsupportedError: it is one; what the transform hangs on it would be lost.
    """
    if is_transformed(tensor):
        raise UnsupportedError(
            "a tensor inside vmap, torch.func.grad, jvp or another transform met a DTensor: its "
            "derivative would end there. Transform a function of local tensors (x.to_local(), "
            "x.full_tensor()), or use torch.autograd."
        )


def _even_shape(local: Tensor, layout: Layout) -> tuple[int, ...]:
    shape = list(local.shape)
    for placement, size in zip(layout.placements, layout.sizes, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            shape[dim] *= size
    return tuple(shape)


def to_local(tensor: DTensor, grad_placements: Sequence[object] | None) -> Tensor:
    """See `DTensor.to_local`."""
    local_escaped(tensor)
    varying = 0
    if grad_placements is not None:
        varying = _terms("to_local", tensor._spec.layout, grad_placements)
    local = face(tensor, varying)
    # Nothing that is made without grad wants any. Used with grad later on, the local itself would
    # take this rank's gradient for the whole.
    return local if torch.is_grad_enabled() else local.detach()


def _terms(what: str, layout: Layout, grad_placements: Sequence[object]) -> int:
    """Mask of the axes on which a gradient is to be a term of a sum where it could be whole.

    Raises:
        LayoutError: a gradient that cannot lie like this.
    """
    wanted = tuple(as_placement(p) for p in grad_placements)
    if len(wanted) != len(layout.placements):
        raise LayoutError(
            f"{what}: {len(wanted)} grad_placements {list(wanted)} for {describe(layout.mesh)}: "
            "give one per mesh axis"
        )
    usual = cotangent_layout(layout, 0).placements
    varying = 0
    for axis, (placement, cotangent) in enumerate(zip(layout.placements, wanted, strict=True)):
        if isinstance(placement, Replicate) and isinstance(cotangent, Partial):
            varying |= 1 << axis
        elif cotangent != usual[axis]:
            raise LayoutError(
                f"{what}(grad_placements={list(wanted)}) of {layout}: a gradient of "
                f"{placement} can lie as {usual[axis]}"
                + (" or Partial()" if isinstance(placement, Replicate) else "")
            )
    return varying & layout.active


def full_tensor(tensor: DTensor, grad_placements: Sequence[object] | None = None) -> Tensor:
    """See `DTensor.full_tensor`."""
    return to_local(replicated(tensor), grad_placements)


def replicated(tensor: DTensor) -> DTensor:
    """The tensor, whole on every rank. Collective."""
    layout = tensor._spec.layout
    return redistributed(tensor, layout.with_placements([Replicate()] * len(layout.placements)))


def as_replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """A plain tensor among DTensors: every rank is taken to hold the same values."""
    layout = Layout.of(mesh, [Replicate()] * mesh.ndim)
    order = None if tensor.is_contiguous() else order_of(tuple(tensor.shape), tensor.stride())
    return wrap(
        _alias(tensor), spec_of(layout.with_order(order), tuple(tensor.shape), tensor.dtype)
    )


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[object] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Lay a global tensor out over a mesh.

    Args:
        tensor: the whole tensor, of the same shape on every rank. It is never changed or aliased.
        device_mesh: the mesh. Default: that of the enclosing `with mesh:`.
        placements: one per mesh axis; default: replicated everywhere.
        src_data_rank: this mesh coordinate's values count (broadcast along every axis); None:
            every rank already holds the same values, and nothing is sent.

    Returns:
        A DTensor; a leaf with `requires_grad` if `tensor` is one.

    Raises:
        LayoutError: placements that do not fit.
    """
    if isinstance(tensor, DTensor):
        return redistribute_to(tensor, device_mesh, placements)
    mesh = device_mesh if device_mesh is not None else current_mesh("distribute_tensor")
    wanted = placements if placements is not None else [Replicate()] * mesh.ndim
    target = Layout.of(mesh, normalized(wanted, tensor.ndim))
    leaf = tensor.is_leaf and tensor.requires_grad
    source = tensor.detach() if leaf else tensor
    if src_data_rank is not None:
        source = _broadcast(source, mesh, src_data_rank)
    result = redistributed(as_replicated(source, mesh), target)
    if result._local_tensor.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        result = wrap(result._local_tensor.clone(), result._spec)
    if leaf:
        result.requires_grad_()
    return result


def _broadcast(tensor: Tensor, mesh: DeviceMesh, source: int) -> Tensor:
    from vescale_comm import broadcast, group_of

    group = group_of(mesh, tuple(range(mesh.ndim)))
    return broadcast(tensor, group, source=source)
