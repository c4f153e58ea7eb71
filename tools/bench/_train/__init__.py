"""Trains and times the variants of the benchmark `train`.

- `model`: a Llama-style decoder as one writes it for one device, and the sizes of a case.
- `training`: what every variant has to offer, and the words for one.
- `ours`, `by_torch`, `by_hand`: the variants. `cases` says which of them run on which mesh.
- `ranks`: what a rank does: prove that all variants compute the same, count, then time in turns.
- `memory`, `profiling`: the meters; `words`: the tables of `--profile`.
"""
