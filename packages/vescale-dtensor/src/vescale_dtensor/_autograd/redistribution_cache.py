"""Per-activation cache of redistributions: a second use in the same layout communicates nothing.

Unmodified models use one activation several times (three projections of one input; a norm written
as several ops). Without the cache each use would gather or reduce it again, in forward and in
backward. Uses of one cached result also share one autograd node, hence one collective in backward.

A cached result is valid while neither side has been written to, and while grad mode would give it
the same history. Parameters and buffers have none: it would keep a gathered copy alive as long as
the model. Whether a result is cached follows from the program, never from local data, so ranks hit
and miss together and no rank communicates alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.observers import notify_operand, operand_watches
from vescale_dtensor._tensor.state import result_outdated


class CachedRedistribution:
    """What a tensor was redistributed to, and for which versions of both that holds.

    Attributes:
        result: the redistributed tensor.
    """

    __slots__ = ("_source", "_versions", "result")

    def __init__(self, source: Tensor, result: DTensor) -> None:
        self.result = result
        self._source = source
        # torch counts every write that it sees. The others are covered by `_tensor.state`: `.data`
        # drops the cache, and a local tensor that was handed out ends caching (`_local_escaped`).
        self._versions = source._version, result._local_tensor._version

    def is_valid(self, source: Tensor) -> bool:
        """Whether `result` is what the local tensor `source` would be redistributed to now."""
        local = self.result._local_tensor
        if self._source is not source or self._versions != (source._version, local._version):
            return False
        # Made without grad, it has no node: used in training, its gradient would end here.
        return local.requires_grad == source.requires_grad or not torch.is_grad_enabled()


def redistributed_cached(tensor: DTensor, target: Layout) -> DTensor:
    """`redistributed(tensor, target)`, cached on the tensor where that is safe. Collective."""
    # Only placements are compared: the result keeps its source's memory order.
    if tensor._spec.layout.placements == target.placements:
        return tensor if tensor._spec.layout.mesh is target.mesh else redistributed(tensor, target)
    known: CachedRedistribution | None = tensor._cached_redistribution
    if known is not None:
        if not known.is_valid(tensor._local_tensor):
            result_outdated(tensor)
        elif known.result._spec.layout.placements == target.placements:
            return known.result
    source = tensor._spec.layout
    if operand_watches:
        notify_operand(tensor, target.placements)
    result = redistributed(tensor, target)
    if result is not tensor and _is_activation(tensor, source):
        tensor._cached_redistribution = CachedRedistribution(tensor._local_tensor, result)
        # The twin spec misses every compiled call made for the unreduced tensor, which would
        # reduce it again.
        if source.partial and not result._spec.layout.partial:
            tensor._spec = tensor._spec.with_known_total
    return result


def cached_total(tensor: DTensor) -> DTensor:
    """A partial tensor's total if some use has reduced it already; else the tensor itself."""
    known: CachedRedistribution | None = tensor._cached_redistribution
    if known is not None and known.is_valid(tensor._local_tensor):
        return known.result
    result_outdated(tensor)
    return tensor


def _is_activation(tensor: DTensor, source: Layout) -> bool:
    """Whether results may be cached on a tensor that had the layout `source`."""
    # A leaf's gradient is reduced in place instead. Writes to a local tensor that was handed out
    # (`to_local`) may go unseen.
    local = tensor._local_tensor
    if tensor._grad_of is not None or tensor._local_escaped:
        return False
    if local.is_inference() or torch.is_inference_mode_enabled():
        return False  # such tensors count no versions
    # Leaves are parameters, or data that lives as long as the run. But without grad every tensor is
    # a leaf: a partial one is an activation of inference, whose sum a norm uses several times.
    return not local.is_leaf or (bool(source.partial) and not local.requires_grad)
