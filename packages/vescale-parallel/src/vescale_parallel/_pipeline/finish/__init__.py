"""Compares the calls of all ranks, and puts their losses, gradients and outputs together.

In: a call of `forward_backward`, then what each rank's runner returns. Out: the same loss on every
rank, complete gradients, the model's output.

- `same_calls`: whether all ranks make the same call. `refused_hooks`: hooks that stages cannot
  call.
- `step_end`: failures, losses and gradients of all stages.
- `outputs`: what the model returns, for ranks whose stage is not the last.
"""
