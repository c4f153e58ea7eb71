"""The trainer: a byte-level decoder on real text, on one device or over a mesh.

- `__main__`: the command; every rank fails with one line, or none does.
- `loop`: options -> mesh, text, `Run`; steps, validation, checkpoints, log.
- `run`: a model in training and one step of it; knows nothing of meshes but the call of
  `parallelize`.
- `model` and `plan`: plain PyTorch, and the 20 lines that distribute it.
- `options`, `data`, `checkpoint`, `log`, `digests`, `all_or_none`: one concern each.

`python -m vescale_parallel.train --help` and `torchrun ... -m vescale_parallel.train`.
"""
