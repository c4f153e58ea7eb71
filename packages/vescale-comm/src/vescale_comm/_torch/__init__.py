"""Collects what this package needs of torch and Python beside collectives.

- `compat`: every look behind torch's public API, each feature-tested. Nothing else has one.
- `buffers`: pack tensors into flat buffers and unpack them, as autograd and tracers can follow.
- `call_site`: the line of the user's code that an error or a trace names.
- `weak_by_id`: a cache by identity that keeps nothing alive.
"""
