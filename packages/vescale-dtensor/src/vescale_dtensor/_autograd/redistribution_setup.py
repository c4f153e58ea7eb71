"""The data-independent part of a redistribution, computed once per (spec, target layout)."""

from __future__ import annotations

import torch

from vescale_dtensor._autograd.uses import CotangentReduction, average_factor, use_masks
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.execution_events import log_of
from vescale_dtensor._layout.layout import Layout, bits
from vescale_dtensor._layout.placements import Partial, Replicate
from vescale_dtensor._layout.spec import Spec, spec_of
from vescale_dtensor._layout.spellings import axes_between
from vescale_dtensor._redistribute.plan import plan_redistribution
from vescale_dtensor._torch.worlds import cached


class PreparedRedistribution:
    """Everything about a redistribution that does not depend on data.

    Attributes:
        plan: the steps that redistribute a local tensor.
        spec: the result's spec.
        masks: the varying axes of each alias of the result; see `uses.use_masks`.
        words: what it is, for comparing it over ranks; None where the ranks do not communicate, are
            not of one mesh, or are not compared.
    """

    __slots__ = ("_reductions", "_source", "_target", "masks", "plan", "spec", "words")

    def __init__(self, spec: Spec, target: Layout) -> None:
        source = spec.layout
        shape, dtype = tuple(spec.shape), spec.tensor_meta.dtype
        target = target.with_order(source.order)
        self.plan = plan_redistribution(source, target, shape, dtype.itemsize)
        self.spec = spec_of(target, shape, dtype)
        self.masks = use_masks(target)
        communicates = any(hasattr(step, "axes") for step in self.plan.steps)
        # Nor where nothing is compared: one process, or a fake world.
        is_event = communicates and one_mesh(source, target) and log_of(source.mesh) is not None
        self.words = f"{spec} → {list(target.placements)}" if is_event else None
        self._source, self._target = source, target
        self._reductions: dict[tuple[bool, torch.dtype | None], tuple[int, CotangentReduction]] = {}

    def for_backward(
        self, leaf: bool, backward_dtype: torch.dtype | None
    ) -> tuple[int, CotangentReduction]:
        """The axes on which the source is used varyingly, and the backward of its node.

        Args:
            leaf: whether the source is a leaf, whose gradient may stay partial.
            backward_dtype: dtype in which the cotangent is sent; None: its own.

        Raises:
            UnsupportedError: a placement on either side has no gradient, as `Partial("max")`.
        """
        known = self._reductions.get((leaf, backward_dtype))
        if known is None:
            # An activation's cotangent has to be complete where it is replicated: other uses of it
            # may be invariant. A leaf notes the use, and masks or reduces as it has to.
            entry = _source_varying_axes(self._source, self._target) if leaf else 0
            scale = _scale(self._source, self._target)
            reduction = CotangentReduction(self._source, entry, self._target, scale, backward_dtype)
            known = self._reductions[leaf, backward_dtype] = entry, reduction
        return known


# A model has hundreds of pairs of layouts at most; an evicted entry costs one more planning.
prepared_redistribution = cached(8192)(PreparedRedistribution)


def one_mesh(source: Layout, target: Layout) -> bool:
    """Whether two layouts are on the same mesh, or on equal ones."""
    return source.mesh is target.mesh or source.mesh == target.mesh


def _source_varying_axes(source: Layout, target: Layout) -> int:
    """Axes on which a redistributed leaf is used varyingly: no communication there in backward."""
    # Axes of different meshes do not correspond to each other; those of two spellings of one do.
    axes = axes_between(source.mesh, target.mesh)
    if axes is None:
        return 0
    # A replicated source is kept on coordinate 0 of an axis where the target is partial, and the
    # cotangent of that is complete on every coordinate: an invariant use.
    wanted = [Replicate() if axis is None else target.placements[axis] for axis in axes]
    keeps = bits(i for i, p in enumerate(wanted) if not isinstance(p, Partial))
    return source.replicated & keeps


def _scale(source: Layout, target: Layout) -> float:
    """Factor of the cotangent: a local tensor of an average of n has 1/n of the gradient.

    Raises:
        UnsupportedError: a partial placement that is neither a sum nor an average.
    """
    for layout in (source, target):
        for placement in layout.placements:
            if isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg"):
                raise UnsupportedError(
                    f"redistribute {source} to {target} with requires_grad: the gradient of a "
                    f"{placement} is not linear. Do it under no_grad, or reduce with the op itself."
                )
    return average_factor(target) / average_factor(source)
