"""`parallelize(..., static=True)`: forwards are captured once, and replayed without dispatch.

- `units`: which modules are captured as one, and what became of each: `captured_units`. In stages
  of a pipeline these are the blocks of a rank; ranks of other stages are asked for nothing.
- `forward`: takes the place of a module's `forward`. It hands the parameters that ZeRO has
  gathered to the captured function as arguments, since each call has others; meanwhile the modules
  hold the stored ones, which is what the guards of a program compare.
- `caches`: calls that are given a cache of keys and values run as they are; training makes none.
- `speed`: whether replays of a unit are faster than its forward, which its ranks decide once.
- `entry`: what `torch.compile` of a model that is not static finds: it captures the forwards.

Hooks of a unit's module (batches, boundaries, ZeRO) run around its `forward`, as ever.
"""
