"""The joint graph of a captured step: forward, loss, backward and gradient sums as one flat graph.

- `draws`: random fills as functional operators, which no pass drops or merges.
- `labels`: which step of the program, forward or backward, an operator comes from.
- `storage`: what is asked about parameters that lie elsewhere, as shards.
- `tracing`: a captured program, differentiated and written down on fake tensors.
- `builder`: nodes that are added to a traced graph by hand.
- `optimizers`: what torch's optimizers do to one parameter, as operators.
- `clipping`, `update`, `update_graph`: clipped gradients, and the step of an optimizer, in the
  graph.
- `lowering`: a graph as it is executed, with fewer calls.
- `step`: what a user holds: it runs the graph, and sets gradients as a backward would.

The graph has operators of torch on local tensors only: autograd nodes of this package leave their
operators, collectives are torch's functional ones. It is traced on fake tensors, so tracing runs
nothing, draws nothing and writes to nothing.
"""

from vescale_dtensor._joint.step import Joint, joint, joint_stored
from vescale_dtensor._joint.storage import ParameterStorage, StoredSlice

__all__ = ["Joint", "ParameterStorage", "StoredSlice", "joint", "joint_stored"]
