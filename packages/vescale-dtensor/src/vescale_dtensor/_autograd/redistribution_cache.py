"""Per-activation cache of redistributions: a second use in the same layout communicates nothing.

Unmodified models use one activation several times (three projections of one input; a norm that is
written out). Each use would gather or reduce it again, in forward and in backward. A cached result
also shares one autograd node, so that all uses share one collective in backward.

A cached result is valid while neither side has been written to and autograd sees what it saw. It is
never cached for a parameter or a buffer: that would keep the whole tensor alive with the model.
Whether there is a cached result follows from the program, so no rank communicates alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._tensor.dtensor import DTensor


class CachedRedistribution:
    """A tensor in another layout.

    Attributes:
        result: the redistributed tensor.
    """

    __slots__ = ("_source", "_versions", "result")

    def __init__(self, source: Tensor, result: DTensor) -> None:
        self.result = result
        self._source = source
        # Counted by torch at every write that it sees. Those that it does not see (`.data`, local
        # tensors that were handed out) end remembering: see `DTensor._local_escaped`.
        self._versions = source._version, result._local_tensor._version

    def is_valid(self, source: Tensor) -> bool:
        """Whether it is what `source` would be redistributed to now."""
        local = self.result._local_tensor
        if self._source is not source or self._versions != (source._version, local._version):
            return False
        # Made without grad, it has no node: used in training, its gradient would end here.
        return local.requires_grad == source.requires_grad or not torch.is_grad_enabled()


def redistributed_cached(tensor: DTensor, target: Layout) -> DTensor:
    """`redistributed(tensor, target)`, remembered where that is safe. Collective."""
    # Only placements: a target lies in memory as its source does, so orders are equal.
    if tensor._spec.layout.placements == target.placements:
        return tensor if tensor._spec.layout.mesh is target.mesh else redistributed(tensor, target)
    known: CachedRedistribution | None = tensor._cached_redistribution
    if known is not None:
        if not known.is_valid(tensor._local_tensor):
            invalidate(tensor)
        elif known.result._spec.layout.placements == target.placements:
            return known.result
    source = tensor._spec.layout
    result = redistributed(tensor, target)
    if result is not tensor and _is_activation(tensor, source):
        tensor._cached_redistribution = CachedRedistribution(tensor._local_tensor, result)
        # Later uses find another spec, hence no compiled call that would reduce the sum again.
        if source.partial and not result._spec.layout.partial:
            tensor._spec = tensor._spec.with_known_total
    return result


def invalidate(tensor: DTensor) -> None:
    """Drop what is remembered: from now on the tensor stands for itself."""
    tensor._cached_redistribution = None
    tensor._spec = tensor._spec.base


def cached_total(tensor: DTensor) -> DTensor:
    """A partial tensor's total, where some use has summed it already; else the tensor itself."""
    known: CachedRedistribution | None = tensor._cached_redistribution
    if known is not None and known.is_valid(tensor._local_tensor):
        return known.result
    invalidate(tensor)
    return tensor


def _is_activation(tensor: DTensor, source: Layout) -> bool:
    local = tensor._local_tensor
    if tensor._grad_of is not None or tensor._local_escaped:
        return False
    if local.is_inference() or torch.is_inference_mode_enabled():
        return False  # such tensors count no versions
    # Partial results without grad are activations of inference: a norm that is written out uses
    # its sum several times. Leaves are parameters, or data that lives as long as the run.
    return not local.is_leaf or (bool(source.partial) and not local.requires_grad)
