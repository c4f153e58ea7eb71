"""Placements, layouts and specs: where the elements of a tensor are. Data only, no tensors.

Start with `placements` (how a tensor is laid out along one mesh axis), then `layout` (a mesh, one
placement per axis, and the order of the dims in memory), then `spec` (a layout with global shape
and dtype: everything a wrapper knows besides its data).

- `shard_geometry` computes which elements a coordinate owns; `local_shards` asks it for a layout.
- `integers` makes plain ints of the numbers in placements.
- `mesh` has what this package needs of torch's DeviceMesh; `notation` prints `f32[8@dp, 4@tp]`.
- `spellings`: one mesh with its axes in another order, and what a layout is on it.
- `execution_events` records what the ranks of a mesh execute together; `first_uses` counts first
  calls.
- `protocol` and `rng_layout` describe layouts to other packages (`__vescale_layout__`).
"""
