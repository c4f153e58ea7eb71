"""Parameters that are stored as shards and used whole: what a layer above needs to gather them.

Such a layer keeps a parameter as a sharded leaf, gathers its values before they are used, and lets
modules compute with a DTensor of the gathered values. The gradient then comes back unsummed, so
that one reduce-scatter of many parameters can both add it up and shard it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._autograd.hooks import hooked_node
from vescale_dtensor._autograd.local_use import join_hidden_node, leaf_gradient_of
from vescale_dtensor._autograd.uses import CotangentReduction, UseAliases, fork_uses, use_masks
from vescale_dtensor._errors import DTensorError, LayoutError
from vescale_dtensor._layout.layout import ById, Layout, normalized
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._layout.placements import Partial
from vescale_dtensor._layout.spec import Spec, spec_of
from vescale_dtensor._tensor.dtensor import DTensor, wrap


def local_leaf(parameter: Tensor) -> Tensor:
    """The local tensor of a leaf, to which torch accumulates this rank's gradient.

    Unlike `to_local` it records no use: an `autograd.Function` that takes it has to return a
    gradient of the local shape, complete on the mesh axes that shard the parameter and not yet
    summed over those that `gathered` found it replicated on.

    Raises:
        DTensorError: the tensor is no leaf.
    """
    if not isinstance(parameter, DTensor) or not parameter._local_tensor.is_leaf:
        raise DTensorError(f"local_leaf: {parameter!r} is not a leaf DTensor")
    local: Tensor = parameter._local_tensor
    return local


def written_unseen(parameter: Tensor) -> bool:
    """Whether the local tensor was handed out, so that writes may miss its version counter.

    `to_local()`, `.data` and `.data = value` do so. The same answer on every rank.
    """
    return isinstance(parameter, DTensor) and parameter._local_escaped


def gathered(
    parameter: DTensor, whole: Tensor, device_mesh: DeviceMesh, placements: Sequence[object]
) -> DTensor:
    """Return a DTensor of a parameter's gathered values; its gradient reaches `whole` unsummed.

    Uses of the result may vary or not on any axis where `placements` replicates; what arrives at
    `whole` is this rank's contribution on all of these. From now on the gradient of `parameter` is
    partial on the axes where it is replicated itself. No communication, in neither direction.

    Args:
        parameter: the stored leaf; its mesh may order the axes otherwise.
        whole: this rank's local tensor of the gathered values, with its autograd history.
        device_mesh: mesh of the result, as that of the tensors that it meets.
        placements: one per axis of that mesh; none may be partial.

    Raises:
        LayoutError: a partial placement, or a `whole` of another shape than they give this rank.
    """
    shape = tuple(parameter.shape)
    spec, expected = _gathered_spec(ById(device_mesh), tuple(placements), shape, whole.dtype)
    layout = spec.layout
    if tuple(whole.shape) != expected:
        raise LayoutError(
            f"gathered: {layout} of global shape {shape} gives this rank the shape {expected}, "
            f"found {tuple(whole.shape)}"
        )
    if not (torch.is_grad_enabled() and whole.requires_grad):
        return wrap(whole.detach(), spec)
    leaf_gradient_of(parameter).note_use(parameter._spec.layout.replicated)
    if not layout.replicated:
        return wrap(whole, spec)
    # All uses are aliases of one node, also those that vary nowhere: it alone can tell which
    # cotangents are complete, and keeps them on one coordinate.
    masks, reduction = _unsummed(layout)
    aliases = fork_uses(whole, whole, masks, reduction, shape)
    result = wrap(aliases[0], spec)
    result._use_aliases = UseAliases(aliases[0], dict(zip(masks, aliases, strict=True)))
    return result


# Asked for every parameter at every step. A mesh is of one rank, so its part follows from the key.
@lru_cache(maxsize=4096)
def _gathered_spec(
    mesh: ById, placements: tuple[object, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Spec, tuple[int, ...]]:
    """The spec of gathered values, and the shape of this rank's part.

    Raises:
        LayoutError: a placement is partial, or does not fit the shape.
    """
    layout = Layout.of(mesh.mesh, normalized(placements, len(shape)))
    if any(isinstance(one, Partial) for one in layout.placements):
        raise LayoutError(f"gathered: values in the layout {layout} are not whole")
    return spec_of(layout, shape, dtype), tuple(local_shape(layout, shape))


@lru_cache(maxsize=1024)
def _unsummed(layout: Layout) -> tuple[tuple[int, ...], CotangentReduction]:
    """Masks of the aliases of a gathered tensor, and a backward that leaves their sum partial."""
    return use_masks(layout), CotangentReduction(layout, layout.replicated, layout)


def before_backward(tensor: Tensor, call: Callable[[], None]) -> Any:
    """Call a function as soon as backward reaches what made a tensor, whichever use led there.

    Unlike a tensor hook it sees no gradient, so nothing has to be completed for it.

    Args:
        tensor: a DTensor or a plain tensor, no leaf.
        call: without arguments.

    Returns:
        A handle with `remove()`.

    Raises:
        RuntimeError: backward does not reach the tensor: it has no history.
    """
    if isinstance(tensor, DTensor):
        join_hidden_node(tensor)
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if local.grad_fn is None:
        raise RuntimeError("before_backward: backward does not reach a tensor without a history")
    return hooked_node(local, lambda _: call())
