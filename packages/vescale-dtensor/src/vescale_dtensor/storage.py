"""Hooks for layers that store parameters otherwise than they are used, as ZeRO does.

Programs that train with DTensors need none of this. A layer above that keeps parameters as shards,
gathers them before their module runs and reduces their gradients by itself is written on it;
`vescale_parallel`'s ZeRO is. In the order of a step:

- **Stored.** A parameter stays a leaf: `local_leaf` and `local_leaves` give the plain tensors that
  autograd accumulates to. `keep_alive` lets a value live as long as a parameter. `separate_memory`
  says that parameters share memory with nothing, and `memories_of` tells when one got other memory.
- **Gathered.** `gathered` makes a DTensor of gathered values; `Gathering` does so for many
  parameters whose values one `autograd.Function` returns. Their gradients come back unsummed, so
  that one reduce-scatter can add up and shard those of many parameters.
- **Written to.** `written_unseen` tells whether writes may miss a version counter, `refuse_writes`
  and `permit_writes` guard gathered memory, and `note_written` tells of a write past all DTensors.
- **Backward.** `before_backward` calls a function when backward reaches what made a tensor, so that
  the layer can gather in time.
- **Gradients.** `set_gradient_reducer` has a function reduce the gradients of many parameters, each
  a `PendingGradient`, when one of them is first needed. `keep_gradient` lets `.grad` tell of
  contributions that a `GradientKeeper` holds, until `release_kept_gradient`. `reduce_gradients`
  completes those of many parameters; for one of them there is `vescale_dtensor.gradient_total`.
- **Norms.** `sum_whole` has sums over ragged shards taken of whole tensors.
- **Graphs.** `joint_stored` is `vescale_dtensor.joint` of a step whose parameters are stored so:
  each `ParameterStorage` says where its parameters are (`StoredSlice`), and gathers and reductions
  are nodes of the graph.
"""

from vescale_dtensor._api.sum_whole import sum_whole
from vescale_dtensor._autograd.gathered_parameters import (
    Gathering,
    before_backward,
    gathered,
    keep_alive,
    local_leaf,
    local_leaves,
    written_unseen,
)
from vescale_dtensor._autograd.gradient_reducer import reduce_gradients, set_gradient_reducer
from vescale_dtensor._autograd.kept_gradient import (
    GradientKeeper,
    keep_gradient,
    release_kept_gradient,
)
from vescale_dtensor._autograd.leaf_gradient import PendingGradient
from vescale_dtensor._joint import ParameterStorage, StoredSlice, joint_stored
from vescale_dtensor._ops.tensor.memory_identity import memories_of, separate_memory
from vescale_dtensor._tensor.copied_views import permit_writes, refuse_writes
from vescale_dtensor._tensor.lineage import note_written

__all__ = [
    "Gathering",
    "GradientKeeper",
    "ParameterStorage",
    "PendingGradient",
    "StoredSlice",
    "before_backward",
    "gathered",
    "joint_stored",
    "keep_alive",
    "keep_gradient",
    "local_leaf",
    "local_leaves",
    "memories_of",
    "note_written",
    "permit_writes",
    "reduce_gradients",
    "refuse_writes",
    "release_kept_gradient",
    "separate_memory",
    "set_gradient_reducer",
    "sum_whole",
    "written_unseen",
]
