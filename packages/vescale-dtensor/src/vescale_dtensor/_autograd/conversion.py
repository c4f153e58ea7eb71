"""Conversions into and out of DTensors: `from_local`, `to_local`, `distribute_tensor`.

All of them keep the typed rule at the border: a plain tensor's gradient is complete, unless
`grad_placements` says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import tensor as torch_dtensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import broadcast, explained_failures, group_of

from vescale_dtensor._autograd.cotangent import cotangent_layout
from vescale_dtensor._autograd.local_agreement import (
    Agreed,
    Asked,
    agreed,
    is_asked_for,
    is_settled,
    take_over_replicated,
)
from vescale_dtensor._autograd.local_aliases import alias_of_leaf, partial_alias
from vescale_dtensor._autograd.local_order import in_memory_order, told_order
from vescale_dtensor._autograd.local_use import local_for_use
from vescale_dtensor._autograd.redistribute import redistribute_to, redistributed, replicated
from vescale_dtensor._errors import LayoutError, UnsupportedError
from vescale_dtensor._layout.derived_placements import as_placement
from vescale_dtensor._layout.execution_events import record
from vescale_dtensor._layout.layout import Layout, Shape, normalized
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._layout.mesh import current_mesh, describe
from vescale_dtensor._layout.notation import short_dtype
from vescale_dtensor._layout.placements import Partial, Replicate, is_flat
from vescale_dtensor._layout.spec import Spec, order_of, spec_of, strides_of, with_strides
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._tensor.fork_check import refuse_if_forked
from vescale_dtensor._tensor.lineage import note_origin
from vescale_dtensor._tensor.observers import observers
from vescale_dtensor._tensor.state import local_escaped
from vescale_dtensor._tensor.value_digest import sampled_digests
from vescale_dtensor._torch.bounded_cache import BoundedCache
from vescale_dtensor._torch.compat import is_traced
from vescale_dtensor._torch.transforms import is_transformed
from vescale_dtensor._torch.untraced import untraced
from vescale_dtensor._torch.worlds import on_world_change

# Elements of a tensor whose values are looked at while it is distributed: of larger ones a digest
# costs as much as distributing them.
_MOST_LOOKED_AT = 1 << 22

# Mesh, placements and local shape, strides and dtype -> the spec of even shards. A hit skips every
# check of `from_agreed_local`, since their outcomes follow from the key. The mesh is in it by its
# id, which no other mesh can have: the spec keeps this one alive.
_even_specs: BoundedCache[tuple[object, ...], Spec] = BoundedCache(8192)
# Those of them of which nothing is compared any more, at no later call: `from_local` ends with it.
_settled_specs: BoundedCache[tuple[object, ...], Spec] = BoundedCache(8192)
on_world_change(_even_specs.clear)
on_world_change(_settled_specs.clear)
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def from_local(
    local_tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[object] | None = None,
    *,
    run_check: bool | Literal["sampled"] = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: Sequence[object] | None = None,
) -> DTensor:
    """Wrap this rank's local tensor of a global tensor; its gradient flows back to it, complete.

    Args:
        local_tensor: this rank's local tensor. It is aliased, and written to by `run_check` only.
        device_mesh: the mesh. Default: that of the enclosing `with mesh:`.
        placements: one per mesh axis; default: replicated everywhere.
        run_check: compare what ranks pass at this call too, and broadcast replicated data: on each
            replicated axis the values of the first rank are written into `local_tensor`, as in
            torch. "sampled": nothing is sent or written; a digest of what is replicated on every
            axis is looked at now and then, and ranks that hold other values are told where the
            result is communicated.
        shape: global shape. Default: the ranks find it out together. That is one all-reduce of
            about two hundred bytes at every call with a sharded dim, and one more exchange if the
            shards are uneven. With `shape`, and with nothing sharded, only the first two calls
            compare what ranks pass. Placements that shard several dims as one need it.
        stride: global strides. Default: the memory order of the local tensors, that of the one
            which tells most of it. With `shape`, only as far as all ranks can know it: a dim keeps
            its row-major place if some rank holds only one index of it, and the tensor is row-major
            if a rank may hold nothing.
        grad_placements: placements of the gradient that `local_tensor` receives. Default: those of
            the tensor, with `Replicate` for `Partial`. `Partial()` for a `Replicate()` gives the
            gradient on coordinate 0 of the axis and zeros elsewhere.

    Raises:
        DisagreementError: ranks pass different dtypes, numbers of dims, placements, shapes, options
            or `requires_grad`. Where these are compared, it is raised on every rank, like the next.
        LayoutError: local shapes that are not those which the layout gives each rank, or a
            `run_check` that is none.
    """
    key = None
    plain = shape is stride is grad_placements is None and run_check is False
    # Observers refuse in forked processes; types are what a look at the class would find. Whatever
    # else is checked below follows from the key.
    if plain and placements is not None and type(local_tensor) in _PLAIN and not observers:
        memory = (local_tensor.shape, local_tensor.stride(), local_tensor.dtype)
        key = (id(device_mesh), *placements, *memory)
        spec = _settled_specs.get(key)
        if spec is not None:
            return wrap(_alias(local_tensor), spec)
    refuse_if_forked("from_local")
    refuse_distributed("from_local", local_tensor)
    mesh = device_mesh if device_mesh is not None else current_mesh("from_local")
    wanted = tuple(placements) if placements is not None else (Replicate(),) * mesh.ndim
    given = _given_shape(shape, wanted)
    order = None if stride is None else tuple(stride)
    asked = Asked(local_tensor, wanted, given, order, rest=_rest(run_check, grad_placements))
    found = _compared(mesh, asked, run_check is True)
    if shape is None:
        given, order = _found(found, local_tensor, mesh, wanted)
        stride = order if stride is None else stride
    made = from_agreed_local(
        local_tensor, mesh, wanted, shape=given, stride=stride, grad_placements=grad_placements
    )
    # Not without a mesh: the current one may be another the next time.
    if key and device_mesh is not None and key in _even_specs and is_settled(mesh, asked):
        _settled_specs.store(key, made._spec)
    if run_check == "sampled" and _has_whole_values(local_tensor, made):
        note_origin(made, sampled_digests(mesh, [local_tensor]))
    return made


def _given_shape(shape: Sequence[int] | None, wanted: tuple[object, ...]) -> Shape | None:
    """The global shape that the caller passes; refused where it has to and does not."""
    if shape is not None:
        return tuple(shape)
    if _any_flat(wanted):
        raise LayoutError(
            f"from_local: {list(wanted)} lies flat in the local tensor, which does not tell the "
            "global shape. Pass it as shape=."
        )
    return None


def _compared(mesh: DeviceMesh, asked: Asked, check: bool) -> Agreed:
    """What was found of the global tensor; collective where ranks compare."""
    found = Agreed()
    if is_asked_for(mesh, asked, check):
        found = agreed(mesh, asked)
        if check:
            take_over_replicated(asked.local, mesh, asked.placements)
    return found


def _found(
    found: Agreed, local: Tensor, mesh: DeviceMesh, wanted: Sequence[object]
) -> tuple[Shape | None, Shape | None]:
    """Shape and strides (without gaps) of the global tensor, as far as the ranks found them."""
    shape = found.shape
    if found.order is None:
        return shape, None
    if shape is None:
        # Even shards: `told_order` tells the rest, and is the same wherever a spec is cached.
        if 1 not in local.shape or found.order == tuple(range(local.ndim)):
            return None, None
        shape = even_shape(local, Layout.of(mesh, normalized(wanted, local.ndim)))
    return shape, strides_of(shape, found.order)


@lru_cache(maxsize=1024)
def _any_flat(placements: tuple[object, ...]) -> bool:
    """Whether a placement shards several dims as one."""
    return any(is_flat(as_placement(p)) for p in placements)


def _rest(run_check: object, grad_placements: Sequence[object] | None) -> tuple[str, ...]:
    """Options of `from_local` that are not their defaults, in words that ranks can compare."""
    if run_check not in (True, False, "sampled"):
        raise LayoutError(f"from_local: run_check={run_check!r}; it is True, False or 'sampled'")
    checked = (f"run_check={run_check}",) if run_check else ()
    # A gradient of another type on one rank would be one summand more, or less, on that rank only.
    graded = () if grad_placements is None else (f"grad_placements={list(grad_placements)}",)
    return (*checked, *graded)


def _has_whole_values(local_tensor: Tensor, made: DTensor) -> bool:
    """Whether every rank should hold these very values, and they can be looked at."""
    everywhere = all(isinstance(p, Replicate) for p in made.placements)
    return everywhere and _can_be_looked_at(local_tensor)


def _can_be_looked_at(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be read here."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta
    hidden = torch.compiler.is_compiling() or is_traced()
    return plain and tensor.layout is torch.strided and not hidden


def from_agreed_local(
    local_tensor: Tensor,
    mesh: DeviceMesh,
    wanted: Sequence[object],
    *,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: Sequence[object] | None = None,
) -> DTensor:
    """`from_local` for arguments on which the ranks are known to agree. No communication.

    Raises:
        LayoutError: this rank's local shape is not the one that the layout gives it.
    """
    # Only even shards are cached: of others the key would need the global shape.
    key = None
    if shape is stride is grad_placements is None:
        memory = (local_tensor.shape, local_tensor.stride(), local_tensor.dtype)
        key = (id(mesh), *wanted, *memory)
        spec = _even_specs.get(key)
        if spec is not None:
            return wrap(_alias(local_tensor), spec)
    ndim = local_tensor.ndim if shape is None else len(shape)
    layout = Layout.of(mesh, normalized(wanted, ndim))
    global_shape = tuple(shape) if shape is not None else even_shape(local_tensor, layout)
    if not layout.inside:
        return _of_outsider(local_tensor, layout, global_shape)
    expected = local_shape(layout, global_shape)
    if tuple(local_tensor.shape) != expected:
        raise LayoutError(
            f"from_local: {layout} of global shape {global_shape} gives this rank the shape "
            f"{expected}, found {tuple(local_tensor.shape)}. Pass the true global shape=."
        )
    if stride is None:
        layout = layout.with_order(told_order(local_tensor, layout, global_shape))
    else:
        layout = layout.with_order(order_of(global_shape, tuple(stride)))
    local = _alias(local_tensor)
    if grad_placements is not None:
        axes = _partial_axes("from_local", layout, grad_placements)
        local = partial_alias(local, layout, axes, global_shape)
    spec = spec_of(layout, global_shape, local_tensor.dtype)
    if stride is not None:
        spec = with_strides(spec, tuple(stride))
    if key is not None:
        _even_specs.store(key, spec)
    return wrap(local, spec)


def _of_outsider(tensor: Tensor, layout: Layout, shape: Shape) -> DTensor:
    """What a rank outside of the mesh has of a tensor: its layout, and no element."""
    return wrap(tensor.detach().new_empty(0), spec_of(layout, shape, tensor.dtype))


def refuse_distributed(what: str, tensor: Tensor) -> None:
    """Refuse a distributed tensor where a plain one is needed.

    Args:
        what: the function that was called, for the message.
        tensor: its argument.

    Raises:
        LayoutError: a DTensor of this package, or of torch.
    """
    if isinstance(tensor, DTensor):
        raise LayoutError(f"{what} needs a plain tensor, found {tensor!r}; use its redistribute()")
    if isinstance(tensor, torch_dtensor.DTensor):
        raise LayoutError(
            f"{what} needs a plain tensor, found one of torch.distributed.tensor on "
            f"{describe(tensor.device_mesh)}, {list(tensor.placements)}: wrapped again, it would "
            "be taken for a part of itself. DTensor.from_torch(x) converts it."
        )


def _alias(tensor: Tensor) -> Tensor:
    """A tensor with the caller's data to wrap, whose gradient flows back to the caller's tensor."""
    if is_transformed(tensor):
        refuse_transformed(tensor)
    # A leaf, or a tensor without grad, is never wrapped itself: `requires_grad_()` of the wrapper
    # would change the caller's tensor, and a varying use would leave a partial sum in its `.grad`.
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor.detach()
    return alias_of_leaf(tensor) if tensor.is_leaf else tensor


def refuse_transformed(tensor: Tensor) -> None:
    """Refuse a plain tensor of vmap, torch.func.grad or forward mode among DTensors.

    Raises:
        UnsupportedError: it is one. What the transform attaches to it would be lost.
    """
    if is_transformed(tensor):
        raise UnsupportedError(
            "a tensor inside vmap, torch.func.grad, jvp or another transform met a DTensor: its "
            "derivative would end there. Transform a function of local tensors (x.to_local(), "
            "x.full_tensor()), or use torch.autograd."
        )


def even_shape(local: Tensor, layout: Layout) -> tuple[int, ...]:
    """The global shape if all shards are as large as this rank's."""
    shape = list(local.shape)
    for placement, size in zip(layout.placements, layout.sizes, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            shape[dim] *= size
    return tuple(shape)


def to_local(tensor: DTensor, grad_placements: Sequence[object] | None) -> Tensor:
    """See `DTensor.to_local`."""
    local_escaped(tensor)  # the caller may write to it: no cached redistribution is safe
    varying = 0
    if grad_placements is not None:
        varying = _partial_axes("to_local", tensor._spec.layout, grad_placements)
    local = local_for_use(tensor, varying)
    # A result made without grad must not require it. The local itself does, and a later recorded
    # use of it would add a rank-local gradient to the tensor's, as if it were complete.
    return local if torch.is_grad_enabled() else local.detach()


def _partial_axes(what: str, layout: Layout, grad_placements: Sequence[object]) -> int:
    """Mask of the replicated axes on which a gradient is to be partial.

    Raises:
        LayoutError: a number of placements other than the mesh's, or placements that no gradient
            of a tensor in this layout can have.
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
    # On an axis of one coordinate a partial and a complete gradient are the same.
    return varying & layout.active


def full_tensor(tensor: DTensor, grad_placements: Sequence[object] | None = None) -> Tensor:
    """See `DTensor.full_tensor`."""
    return to_local(replicated(tensor), grad_placements)


def as_replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Wrap a plain tensor as replicated, trusting that every rank holds the same values."""
    return wrap(_alias(tensor), _replicated_spec(tensor, tensor.stride(), mesh))


def _replicated_spec(tensor: Tensor, strides: Sequence[int], mesh: DeviceMesh) -> Spec:
    shape = tuple(tensor.shape)
    layout = Layout.of(mesh, [Replicate()] * mesh.ndim, order_of(shape, strides))
    return spec_of(layout, shape, tensor.dtype)


@untraced
def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[object] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a global tensor over a mesh. Collective, unless `src_data_rank` is None.

    Args:
        tensor: the global tensor, of the same shape on every rank. It is never changed or aliased.
            The result has its strides, and the local tensors have its memory order.
        device_mesh: the mesh. Default: that of the enclosing `with mesh:`.
        placements: one per mesh axis; default: replicated everywhere.
        src_data_rank: index, in the mesh's row-major order, of the rank whose values and strides
            are broadcast to all; None: every rank already holds the same, and nothing is sent.
            A rank outside of the mesh takes no part, and holds nothing: its local tensor has the
            shape (0,). A tensor on the meta device has no values to send; local tensors are there.

    Returns:
        A DTensor; a leaf with `requires_grad` if `tensor` is one.

    Raises:
        LayoutError: placements that do not fit the tensor or the mesh, or a distributed tensor of
            `torch.distributed.tensor`.
    """
    if isinstance(tensor, DTensor):
        return redistribute_to(tensor, device_mesh, placements)
    refuse_if_forked("distribute_tensor")
    refuse_distributed("distribute_tensor", tensor)
    mesh = device_mesh if device_mesh is not None else current_mesh("distribute_tensor")
    wanted = placements if placements is not None else [Replicate()] * mesh.ndim
    target = Layout.of(mesh, normalized(wanted, tensor.ndim))
    # As torch does it: a leaf becomes a new leaf with a gradient of its own; any other tensor
    # stays connected, and its gradient flows back through the broadcast.
    leaf = tensor.is_leaf and tensor.requires_grad
    source = tensor.detach() if leaf else tensor
    strides = tuple(tensor.stride())
    if not target.inside:
        order = order_of(tuple(tensor.shape), strides)
        made = _of_outsider(tensor, target.with_order(order), tuple(tensor.shape))
        made.requires_grad_(leaf)
        return made
    if src_data_rank is not None:
        where = ("without values",) if tensor.is_meta else ()
        asked = (short_dtype(tensor.dtype), tuple(tensor.shape), f"as {list(wanted)}", *where)
        strides = _broadcast_strides(strides, mesh, src_data_rank, asked)
        if not tensor.is_meta:  # which all ranks agree on: it was compared with what they ask for
            source = _broadcast(source, mesh, src_data_rank)  # row-major, however it was before
    everywhere = wrap(_alias(source), _replicated_spec(tensor, strides, mesh))
    result = redistributed(everywhere, target)
    local = in_memory_order(result._local_tensor, result._spec.layout.order)
    # Where nothing was sent or sliced, the local tensor is still the caller's memory. A branch that
    # ranks may take differently: it only copies.
    if not local.is_meta and (
        local.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    ):
        local = local.clone()
    spec = with_strides(result._spec, strides)
    if local is not result._local_tensor or spec is not result._spec:
        result = wrap(local, spec)
    note_origin(result, _digests_of_whole(tensor, mesh) if src_data_rank is None else ())
    if leaf:
        result.requires_grad_()
    return result


def _digests_of_whole(tensor: Tensor, mesh: DeviceMesh) -> tuple[int, ...]:
    """Now and then digests of what all ranks should pass alike, while nothing is sent."""
    if tensor.numel() > _MOST_LOOKED_AT or not _can_be_looked_at(tensor):
        return ()
    return sampled_digests(mesh, [tensor])


def _broadcast(tensor: Tensor, mesh: DeviceMesh, source: int) -> Tensor:
    """The source rank's values on every rank of the mesh. Collective, differentiable."""
    group = group_of(mesh, tuple(range(mesh.ndim)))
    return broadcast(tensor, group, source=source)


def _broadcast_strides(
    strides: Shape, mesh: DeviceMesh, source: int, asked: tuple[object, ...]
) -> Shape:
    """The source rank's strides, on every rank, if all ask for the same. Collective.

    Strides decide the memory order, which is part of the layout: ranks with different ones would
    make different plans, and meet in different collectives.
    """
    group = group_of(mesh, tuple(range(mesh.ndim)))
    if group.size == 1 or "fake" in group.backends.values():
        return strides
    # Before anything is sent: backends mix up, or abort at, broadcasts of other sizes.
    record(mesh, ("distributes", *asked, f"of rank {group.ranks[source]}"))
    if not strides:
        return strides
    device = "cpu" if "cpu" in group.backends else mesh.device_type
    told = torch.tensor(strides, dtype=torch.int64, device=device)
    with explained_failures("broadcast", told, group):
        dist.broadcast(told, group.ranks[source], group=group.process_group)
    return tuple(told.tolist())
