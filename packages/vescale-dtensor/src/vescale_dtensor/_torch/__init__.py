"""What this package needs of torch and Python that has nothing to do with distribution.

- `compat` is the one list of torch's private API, each entry feature-tested, with its fallback.
- `overridable` lets a TorchFunctionMode see one of our functions as a single call.
- `pytree` finds tensors in nested arguments; `scalars` knows which numbers torch takes for numbers;
  `opmath` is the precision that reductions of half floats run in; `bounded_cache` holds results
  that can be computed again, and tells caches when they are stale.

Nothing here imports another part of the package.
"""
