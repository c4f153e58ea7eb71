"""Activation checkpointing by the plan: which modules are computed again in backward, and how.

Top to bottom (imports point down):

- `install`: puts regions into a model; with a budget, decides at each batch how many of them.
- `region`: one module whose forward is computed again in backward.
- `saved_results`: the results of expensive operators that are kept all the same.
- `resolve`: rules and a model -> regions, or what is wrong. `rules`: text -> rules.
"""
