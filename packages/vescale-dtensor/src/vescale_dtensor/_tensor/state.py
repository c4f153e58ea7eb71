"""Drops what a wrapper has cached about its local tensor: four events, and nothing else does it.

A wrapper caches what followed from its local tensor: aliases for varying uses (`_use_aliases`), the
gradient state of a leaf (`_leaf_gradient`), and the layouts it was redistributed to
(`_cached_redistribution`). Each event says which of these can no longer be true; whoever changes a
local tensor calls one.
"""

from __future__ import annotations

from vescale_dtensor._tensor.dtensor import DTensor


def data_written(tensor: DTensor) -> None:
    """The same local tensor holds other data: `.data = …`. It is still the same leaf."""
    tensor._use_aliases = tensor._cached_redistribution = None


def local_replaced(tensor: DTensor) -> None:
    """The local is another tensor, or of another shape: `set_`, in-place views.

    The gradient state goes, too: it belongs to the local tensor that was.
    """
    tensor._use_aliases = tensor._leaf_gradient = tensor._cached_redistribution = None


def local_escaped(tensor: DTensor) -> None:
    """Others hold the local tensor and may write to it unseen, now or later.

    So no redistribution of this tensor may be remembered from now on.
    """
    tensor._local_escaped, tensor._cached_redistribution = True, None


def history_replaced(tensor: DTensor) -> None:
    """The local has another autograd history: aliases that were made before lack it."""
    tensor._use_aliases = None
