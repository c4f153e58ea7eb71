"""What the benchmark `models` is made of.

- `zoo`: models of transformers that nobody adapted, by their configurations, and their batches.
- `sides`: what trains them: ours, eagerly, static and as a graph; torch's FSDP2, with its tensor
  parallelism where a model declares a plan that torch has the styles of; one device.
- `ranks`: what a rank does: prove that all sides compute the same, count, then time in turns.
"""
