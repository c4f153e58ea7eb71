"""The trainer: a byte-level decoder on real text, on one device or over a mesh.

`python -m vescale_parallel.train --help` and `torchrun ... -m vescale_parallel.train`.
"""
