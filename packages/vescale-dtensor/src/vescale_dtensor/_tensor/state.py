"""Drops what a wrapper has cached about its local tensor: five events, and nothing else does.

A wrapper caches what follows from its local tensor: aliases for varying uses (`_use_aliases`), the
gradient state of a leaf (`_leaf_gradient`), and the last redistribution (`_cached_redistribution`).
Each event says which of these can no longer be true. Code that changes a local tensor calls one of
them, except for in-place ops that torch counts in the tensor's version, which the caches check.
"""

from __future__ import annotations

from vescale_dtensor._tensor.dtensor import DTensor


def data_written(tensor: DTensor) -> None:
    """The same local tensor object holds other data (`x.data = ...`); it is still the same leaf."""
    # Torch does not count such a write in the version, so the caches could not notice it. The spec
    # may keep saying that a total is known; `cached_total` corrects it when it finds none.
    tensor._use_aliases = tensor._cached_redistribution = None


def local_replaced(tensor: DTensor) -> None:
    """The local tensor is another one, or has another shape: `set_`, in-place views.

    The gradient state is dropped as well: it belongs to the former local tensor.
    """
    if tensor._leaf_gradient is not None:
        tensor._leaf_gradient.retire()  # others may hold it: a gradient that somebody kept
    tensor._use_aliases = tensor._leaf_gradient = tensor._cached_redistribution = None


def local_escaped(tensor: DTensor) -> None:
    """Others hold the local tensor and may write to it unseen, now or later.

    So no redistribution of this tensor may be cached from now on.
    """
    tensor._local_escaped, tensor._cached_redistribution = True, None


def history_replaced(tensor: DTensor) -> None:
    """The local tensor has another autograd history, which aliases made before do not have."""
    # A cached redistribution notices by itself: the local tensor is another one, or its
    # `requires_grad` differs.
    tensor._use_aliases = None


def result_outdated(tensor: DTensor) -> None:
    """The cached redistribution no longer holds: torch has counted a write since it was made.

    The spec that says that there is a total goes with it.
    """
    tensor._cached_redistribution = None
    tensor._spec = tensor._spec.base
