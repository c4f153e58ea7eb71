"""Finished programs: their replays, and the comparison of some with the function.

In comes a call that a program may stand for; out goes what the function would return.

- `program` holds the graph and its guards, and runs it. `leaf_uses` notes the uses of parameters
  that it makes; `listing` prints it.
- `misses` decides whether a call that no program stands for is recorded, or only run.
- `comparisons` chooses the calls that are compared, by a vote of the ranks. `replay_check` compares
  one: `changed_state` is what both runs write to, `histories` their autograd graphs and gradients.
"""
