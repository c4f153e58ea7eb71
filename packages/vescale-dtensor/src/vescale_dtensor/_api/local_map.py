"""`local_map`: lets a function of local tensors take and return DTensors, with typed gradients.

Along a mesh axis the function is *invariant* if every tensor that enters or leaves it is replicated
there, and *varying* otherwise. Where it varies, the cotangent of a replicated input is a partial
sum, and the cotangent of a replicated output is counted once, on coordinate 0: as if the loss were
a sum over the ranks, which is what collectives with true adjoints (vescale_comm) differentiate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_unflatten

from vescale_dtensor._autograd.conversion import even_shape, from_agreed_local
from vescale_dtensor._autograd.local_agreement import (
    Asked,
    agreed,
    can_exchange,
    is_asked_for,
)
from vescale_dtensor._autograd.local_aliases import partial_alias
from vescale_dtensor._autograd.local_order import computed_order
from vescale_dtensor._autograd.local_use import local_for_use
from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._dispatch.one_mesh import brought_to
from vescale_dtensor._errors import LayoutError, MeshError, UnsupportedError
from vescale_dtensor._layout.derived_placements import as_placement, on_dim
from vescale_dtensor._layout.layout import Layout, Shape, bits, normalized
from vescale_dtensor._layout.mesh import describe
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import Replicate, is_flat
from vescale_dtensor._layout.spec import strides_of
from vescale_dtensor._layout.spellings import axes_between
from vescale_dtensor._planning.plan import function_name
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.untraced import untraced

PlacementsLike = Sequence[object] | None
Function = Callable[..., Any]

_NO_TYPES = (
    "local_map: spmd_types=True was asked for, and nothing here checks the types of local tensors"
    " inside of a function. Leave it out: gradients are typed by in_placements, out_placements and"
    " in_grad_placements"
)


@dataclass(frozen=True)
class _Mapping:
    """The arguments of `local_map`, with one name of the function for all messages."""

    func: Function
    out_placements: Any
    in_placements: tuple[PlacementsLike, ...] | None
    in_grad_placements: tuple[PlacementsLike, ...] | None
    device_mesh: DeviceMesh | None
    redistribute_inputs: bool
    out_shapes: Sequence[Sequence[int] | None] | None

    @property
    def name(self) -> str:
        return f"local_map({function_name(self.func)})"


def local_map(
    func: Function | None = None,
    out_placements: Any = None,
    in_placements: tuple[PlacementsLike, ...] | None = None,
    in_grad_placements: tuple[PlacementsLike, ...] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
    spmd_types: bool = False,
    out_shapes: Sequence[Sequence[int] | None] | None = None,
) -> Function:
    """Let a function that is written for local tensors take and return DTensors.

    The signature is that of `torch.distributed.tensor.experimental.local_map`, and `out_shapes`.

    Args:
        func: called with local tensors in place of DTensors. None: returns a decorator.
        out_placements: placements of the one output, or a tuple with one entry for each leaf of the
            output; None for an output that is not a tensor.
        in_placements: the placements that each positional argument must have, one entry for each
            leaf of the arguments; None for a leaf that is not a DTensor.
        in_grad_placements: the layout of the gradient that `func` gives a replicated input, where
            the typed rule does not tell: `Partial()` for partial sums, `Replicate()` for complete
            ones.
        device_mesh: mesh of the outputs. Default: the one of the inputs.
        redistribute_inputs: redistribute inputs to `in_placements`; otherwise a difference is an
            error.
        spmd_types: only False. torch 2.14 and later let a package of that name check what `func`
            does inside; here only inputs and outputs have types, by their placements.
        out_shapes: global shapes of the outputs. Default: the ranks find them out together, as for
            `from_local`. That is one all-reduce of sixteen bytes for each output with a
            sharded dim, at every call, and one more exchange if the shards are uneven. With
            `out_shapes`, and with nothing sharded, only the first two calls compare what the ranks
            hold. Placements that shard several dims as one need it. Where nothing can be exchanged
            (while a graph is recorded) an output dim that is sharded as an input dim, with the same
            local extent, has its global extent, and other dims are sharded evenly.

    Raises:
        DisagreementError: the ranks' outputs differ in dtype, number of dims, `requires_grad` or
            memory order. Where these are compared, it is raised on every rank, like the next.
        LayoutError: placements that do not fit, local shapes that are not those which the layout
            gives each rank, or an output whose global shape is not known.
        MeshError: inputs on several meshes.
        UnsupportedError: `spmd_types=True`.
    """
    if spmd_types:
        raise UnsupportedError(_NO_TYPES)
    placements = (out_placements, in_placements, in_grad_placements, device_mesh)
    if func is None:
        return lambda later: local_map(
            later, *placements, redistribute_inputs=redistribute_inputs, out_shapes=out_shapes
        )
    mapping = _Mapping(func, *placements, redistribute_inputs, out_shapes)

    @wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return _run(mapping, args, kwargs)

    return mapped


@untraced
def _run(mapping: _Mapping, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call the function with local tensors, and wrap its results. Collective where inputs are."""
    flat, tree = tree_flatten(args)
    # Placements are given by position, so there would be none to check a named DTensor against.
    if any(isinstance(value, DTensor) for value in tree_flatten(kwargs)[0]):
        raise LayoutError(f"{mapping.name}: pass DTensors by position; names reach it unchanged")
    # Without DTensors it is the plain function, as torch's `local_map` has it.
    if not any(isinstance(value, DTensor) for value in flat):
        return mapping.func(*args, **kwargs)
    mesh = mapping.device_mesh
    if mesh is None:
        # Placements are for the axes of one mesh, in the order of one spelling of it.
        mesh = _common_mesh(mapping, flat)
        flat = [brought_to(value, mesh) for value in flat]
    inputs = _placed(mapping, flat)
    grads = _entries(mapping, "in_grad_placements", mapping.in_grad_placements, len(flat))
    outputs = mapping.out_placements
    outputs = outputs if _is_tuple_of_outputs(outputs) else (outputs,)
    # From the layouts of all inputs and outputs together, before any of them enters: which alias of
    # a replicated input enters depends on all the others.
    varying = _varying(inputs, outputs, grads)
    locals_ = [
        _entering(value, grad, varying) if isinstance(value, DTensor) else value
        for value, grad in zip(inputs, grads, strict=True)
    ]
    # The one call of the user's code. What it sends is its own affair: collectives in it are
    # recorded with their adjoints, and must be reached by all ranks.
    results, form = tree_flatten(mapping.func(*tree_unflatten(locals_, tree), **kwargs))
    if len(results) != len(outputs):
        raise LayoutError(
            f"{mapping.name} returned {len(results)} values, but out_placements has "
            f"{len(outputs)} entries: give one for each, in a tuple"
        )
    shapes = _entries(mapping, "out_shapes", mapping.out_shapes, len(results))
    known = [value for value in inputs if isinstance(value, DTensor)]
    wrapped = [
        _wrap_result(mapping, mesh, result, placed, shape, varying, known)
        for result, placed, shape in zip(results, outputs, shapes, strict=True)
    ]
    return tree_unflatten(wrapped, form)


def _is_tuple_of_outputs(outputs: Any) -> bool:
    """Whether this is a tuple of entries, and not the placements of one output given as a tuple."""
    return isinstance(outputs, tuple) and (
        not outputs or any(p is None or isinstance(p, list | tuple) for p in outputs)
    )


def _entries(mapping: _Mapping, what: str, given: Any, count: int) -> list[Any]:
    """Return one entry per value; None for each where nothing was given.

    Raises:
        LayoutError: the number of entries is not that of the values.
    """
    if given is None:
        return [None] * count
    if len(given) != count:
        raise LayoutError(f"{mapping.name}: {what} has {len(given)} entries for {count} values")
    return list(given)


def _placed(mapping: _Mapping, flat: list[Any]) -> list[Any]:
    """Return the arguments in their `in_placements`."""
    if mapping.in_placements is None:
        return flat
    wanted = _entries(mapping, "in_placements", mapping.in_placements, len(flat))
    return [
        _one_placed(mapping, index, value, want)
        for index, (value, want) in enumerate(zip(flat, wanted, strict=True))
    ]


def _one_placed(mapping: _Mapping, index: int, value: Any, want: PlacementsLike) -> Any:
    """Check one argument against its placements, or redistribute it. Collective if it does.

    Raises:
        LayoutError: it has other placements and may not be redistributed, or the entry is for
            something else.
    """
    if not isinstance(value, DTensor):
        if want is not None and not isinstance(value, Tensor):
            raise LayoutError(f"{mapping.name}: in_placements[{index}] is for a tensor; give None")
        return value
    if want is None:
        raise LayoutError(f"{mapping.name}: in_placements[{index}] is None, but {value!r} came")
    target = Layout.of(value.device_mesh, normalized(want, value.ndim))
    # Compared by placements alone: the memory order of an input is its own.
    if value.placements != target.placements and not mapping.redistribute_inputs:
        raise LayoutError(
            f"{mapping.name}: argument {index} lies as {list(value.placements)}, in_placements "
            f"asks for {list(target.placements)}; redistribute it, or pass redistribute_inputs=True"
        )
    return redistributed(value, target)


def _common_mesh(mapping: _Mapping, inputs: list[Any]) -> DeviceMesh:
    """Return the mesh of all inputs, as the first of them spells it.

    Raises:
        MeshError: there are several.
    """
    meshes: list[DeviceMesh] = [value.device_mesh for value in inputs if isinstance(value, DTensor)]
    for mesh in meshes:
        if axes_between(mesh, meshes[0]) is None:
            raise MeshError(
                f"{mapping.name}: inputs on {describe(meshes[0])} and on {describe(mesh)}; "
                "bring them to one mesh first, or name the mesh of the outputs: device_mesh="
            )
    return meshes[0]


def _varying(inputs: list[Any], outputs: Any, grads: list[Any]) -> int:
    """Return the mask of the axes on which anything that enters or leaves is not replicated."""
    rows = [value.placements for value in inputs if isinstance(value, DTensor)]
    rows += [row for row in (*outputs, *grads) if row is not None]
    return bits(axis for row in rows for axis, p in enumerate(row) if not p.is_replicate())


def _entering(value: DTensor, grad: PlacementsLike, varying: int) -> Tensor:
    """Return the local tensor that enters the function for a DTensor."""
    if grad is not None:
        return value.to_local(grad_placements=grad)
    # Only replicated axes have the choice; sharded and partial ones vary in any case.
    return local_for_use(value, varying & value._spec.layout.replicated)


def _wrap_result(
    mapping: _Mapping,
    mesh: DeviceMesh,
    result: Any,
    placed: PlacementsLike,
    shape: Sequence[int] | None,
    varying: int,
    inputs: list[DTensor],
) -> Any:
    """Wrap one result of the function.

    Raises:
        LayoutError: it is not what its entry in `out_placements` says, or its shape is unknown.
    """
    if not isinstance(result, Tensor):
        if placed is not None:
            raise LayoutError(
                f"{mapping.name} returned a {type(result).__name__} where out_placements has "
                f"{placed}; give None for what is no tensor"
            )
        return result
    if isinstance(result, DTensor):
        raise LayoutError(f"{mapping.name} returned {result!r}; it has to return local tensors")
    wanted = tuple(placed) if placed is not None else (Replicate(),) * mesh.ndim
    given = None if shape is None else tuple(shape)
    layout, whole = _layout_and_shape(mapping, mesh, result, wanted, given, inputs)
    # Replicated by the word of the caller, but computed from varying values: its cotangent enters
    # the function on coordinate 0 only, or each coordinate would add it once more.
    result = partial_alias(result, layout, layout.replicated & varying, whole)
    strides = strides_of(whole, computed_order(result, layout, whole))
    # Without a further exchange: layout and shape are the same on all ranks by now.
    return from_agreed_local(result, mesh, layout.placements, shape=whole, stride=strides)


def _layout_and_shape(
    mapping: _Mapping,
    mesh: DeviceMesh,
    result: Tensor,
    wanted: tuple[object, ...],
    given: Shape | None,
    inputs: list[DTensor],
) -> tuple[Layout, Shape]:
    """Return the layout and global shape of an output. Collective, unless `given` is known to all.

    Raises:
        DisagreementError: the ranks' results differ in what has to be the same everywhere.
        LayoutError: the results are not the shards of one tensor.
    """
    if given is None and any(is_flat(as_placement(p)) for p in wanted):
        raise LayoutError(
            f"{mapping.name}: {list(wanted)} lies flat in the local tensor, which does not tell "
            "the global shape. Pass out_shapes="
        )
    # Before anything that depends on this rank's result and may raise, or the others would wait.
    asked = Asked(result, wanted, given, None, mapping.name, "out_shapes=", computed=True)
    compared = is_asked_for(mesh, asked, False) and can_exchange(mesh, result)
    found = agreed(mesh, asked).shape if compared else None
    known = given if given is not None else found
    layout = Layout.of(mesh, normalized(wanted, result.ndim if known is None else len(known)))
    if known is not None:
        return layout, known
    if compared:
        return layout, even_shape(result, layout)
    return layout, _inferred_shape(mapping, result, layout, inputs)


def _inferred_shape(
    mapping: _Mapping, result: Tensor, layout: Layout, inputs: list[DTensor]
) -> Shape:
    """Return the global shape of an output, from its layout and what is known of the inputs.

    For where the ranks cannot exchange what they hold: while a CUDA graph or a program is recorded,
    or with a fake group.

    Raises:
        LayoutError: it could differ from rank to rank.
    """
    shape = list(result.shape)
    for dim, extent in enumerate(shape):
        cuts = _shards_of_dim(layout, dim)
        if not cuts:
            continue
        known = [n for value in inputs for n in _extents_sharded_alike(value, cuts, extent)]
        # Uneven shards do not tell their global extent; an input with the same shards does.
        if known:
            shape[dim] = known[0]
        elif all(_is_even(value) for value in inputs):
            # All ranks passed equal extents in, so equal extents came out, unless they depend on
            # the data: then `out_shapes` is needed, and nothing here can see that.
            shape[dim] = extent * prod(layout.sizes[axis] for axis, _ in cuts)
        else:
            raise LayoutError(
                f"{mapping.name}: dim {dim} of an output is {list(layout.placements)} and holds "
                f"{extent} here, like no input, and the inputs are cut unevenly: its global extent "
                "is unknown. Pass out_shapes="
            )
    return tuple(shape)


def _shards_of_dim(layout: Layout, dim: int) -> list[tuple[int, Placement]]:
    """Return the axes that shard one dim, with their placements as of dim 0, to be compared."""
    return [
        (axis, on_dim(placement, 0))
        for axis, placement in enumerate(layout.placements)
        if isinstance(placement, Sharded) and placement.cut_dims() == (dim,)
    ]


def _extents_sharded_alike(
    value: DTensor, cuts: list[tuple[int, Placement]], extent: int
) -> Iterator[int]:
    """Yield the global extents of input dims with the same shards and the same local extent."""
    layout, local = value._spec.layout, value._local_tensor
    if local.ndim != value.ndim:
        return  # dims that are sharded as one have no local extent of their own
    for dim in range(value.ndim):
        if local.shape[dim] == extent and _shards_of_dim(layout, dim) == cuts:
            yield value.shape[dim]


def _is_even(value: DTensor) -> bool:
    """Whether every rank's local tensor has the same shape."""
    layout = value._spec.layout
    shape = list(value.shape)
    for placement, count in zip(layout.placements, layout.sizes, strict=True):
        if not isinstance(placement, Sharded):
            continue
        if len(placement.cut_dims()) > 1:
            return False
        dim = placement.cut_dims()[0]
        if len(set(placement.sizes(shape[dim], count))) > 1:
            return False
        # The next axis that shards this dim divides what this one leaves.
        shape[dim] //= count
    return True
