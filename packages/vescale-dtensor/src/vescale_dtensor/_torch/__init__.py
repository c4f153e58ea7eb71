"""Collects what this package needs of torch and Python beside distribution.

- `compat` is the list of torch's private API, each entry feature-tested, with its fallback;
  `transforms` is the part of it that tells of torch.func and forward mode.
- `overridable` lets a TorchFunctionMode see one of our functions as a single call.
- `schemas` reads from torch's schemas what a function's arguments are called and which it writes.
- `scalars` converts NumPy's and torch's numbers; `opmath` is the precision in which reductions of
  half floats run; `bounded_cache` holds results that can be computed again, and lets caches
  subscribe to changes; `worlds` empties those that hold meshes once their process groups were
  destroyed and others made.
- `untraced` is what torch.compile is to call as it is.

Nothing here imports another part of the package.
"""
