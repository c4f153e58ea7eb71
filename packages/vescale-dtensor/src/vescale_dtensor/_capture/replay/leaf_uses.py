"""The leaves that a program uses: parameters, and arguments that require grad.

In eager mode each use of a leaf notes the axes on which it varies, which decides the type of its
gradient; a use that is invariant on an axis gets a node that masks its gradient there if others
vary. A program notes all its uses at once. Since it knows them all, it needs no node where none
varies on an axis: the leaf is then marked as never partial there.
"""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor

from vescale_dtensor._autograd.leaf_use import leaf_for_use, try_never_partial
from vescale_dtensor._autograd.local_use import leaf_gradient_of
from vescale_dtensor._capture.record.graph import TracedGraph
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.overridable import implementation_of


class LeafUses:
    """All uses of leaves in a program."""

    def __init__(self, trace: TracedGraph) -> None:
        uses = list(trace.uses.values())
        self._arguments = [(use.source.index, use.varying) for use in uses
                           if use.source.index is not None]  # fmt: skip
        self._free = [use for use in uses if use.source.index is None]
        self._pins = _try_never_partial(trace)
        # Their gradient states are constants of the program.
        self._fixed = [(use.wrapper, use.wrapper._leaf_gradient) for use in self._free
                       if use.node is not None and use.node.users]  # fmt: skip
        self._wrappers = [use.wrapper for use in self._free]
        self._leaves = [wrapper._leaf_gradient for wrapper in self._wrappers]
        # Local tensors for which all uses are noted; empty, so that the first call notes them.
        self._locals: list[Tensor] = []

    def note_free_leaves(self, locals_: list[Tensor]) -> bool:
        """Whether the free leaves of the program may be used as it uses them; notes the uses.

        What was noted once stays noted, so usually there is nothing to do.

        Args:
            locals_: the local tensors of all free DTensors.
        """
        # A leaf whose local tensor or gradient state was replaced knows nothing of its uses.
        same = [w._leaf_gradient for w in self._wrappers] == self._leaves
        if same and len(locals_) == len(self._locals) and all(map(is_, locals_, self._locals)):
            return True
        for use in self._free:
            # First of all, as it makes the states that are asked for below.
            leaf_gradient_of(use.wrapper).note_use(use.varying)
        # The program has the old state among its constants, which says nothing of a new leaf.
        if any(leaf_gradient_of(wrapper) is not leaf for wrapper, leaf in self._fixed):
            return False
        self._leaves = [w._leaf_gradient for w in self._wrappers]
        if not all(
            try_never_partial(leaf_gradient_of(wrapper), varying) for wrapper, varying in self._pins
        ):
            return False
        # Only where all of it worked: else the next call tries again.
        self._locals = locals_
        return True

    def note_arguments(self, flat: list[Any]) -> None:
        """Note the uses of leaves among the arguments."""
        for index, varying in self._arguments:
            leaf_gradient_of(flat[index]).note_use(varying)


def _try_never_partial(trace: TracedGraph) -> list[tuple[DTensor, int]]:
    """Drop the nodes of uses that need none; the leaves that are pinned for it, and how."""
    pinned = []
    step = implementation_of(leaf_for_use)
    for node in [n for n in trace.graph.nodes if n.target is step]:
        state, local, varying, _ = node.args
        use = trace.use_at(state)
        if (
            use is not None
            # Of an argument it would have to be tried for each new leaf, and could fail after the
            # graph was changed for it.
            and use.source.index is None
            and try_never_partial(leaf_gradient_of(use.wrapper), varying)
        ):
            node.replace_all_uses_with(local)
            pinned.append((use.wrapper, varying))
    return pinned
