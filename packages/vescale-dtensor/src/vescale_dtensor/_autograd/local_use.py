"""The local tensor for a use of a wrapper, recorded by autograd or not."""

from __future__ import annotations

import torch
from torch import Tensor

from vescale_dtensor._autograd.leaf_gradient import Leaf, leaf_face
from vescale_dtensor._autograd.uses import (
    Faces,
    hub_faces,
)
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import hook_own_gradient


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
