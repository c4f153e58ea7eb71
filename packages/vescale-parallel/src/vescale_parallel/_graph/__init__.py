"""The communication of a step's graph: seen, agreed on, bucketed, reordered, simulated.

How a graph goes through the files:

- `joint_step`: a model's step as one graph; `stored_units`: units of ZeRO as what it gathers;
  `placement`: gathers where they are used, and sums when they are ready.
- `collectives`: what communicates in it, and what each collective has to wait for.
- `agreement`: all ranks tell each other their lists of collectives. They must be the same; what
  collectives need is united over ranks, sizes are the largest. Every decision is made from this.
- `collective_plan`: which collectives travel together, and in which order: a pure function of what
  is agreed, so ranks whose graphs differ (where a gradient is masked, say) decide alike.
- `rewrite`: the plan carried out on this rank's graph.
- `recomputation`: activations computed a second time; `offload`: or kept on the host meanwhile;
  `host_ops`: the copies, as operators.
- `compiled_regions`: what lies between the collectives handed to a compiler, region by region;
  `numbers`: those that change from step to step, as tensors.
- `values`: what nodes that are added say of what they make.
- `machine`: rates that are measured, and kept in a file; what each node took.
- `timeline`: the graph run on paper, computation beside communication.
"""
