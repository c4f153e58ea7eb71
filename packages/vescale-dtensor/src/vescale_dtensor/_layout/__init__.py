"""Where the elements of a tensor lie: placements, layouts, specs. Data only, no tensors.

Start with `placements` (one mesh axis), then `layout` (a mesh, one placement per axis, and the
order of the dims in memory; interned, so that layouts compare by identity), then `spec` (a layout
with global shape and dtype: all that a wrapper knows besides its data).

- `shard_geometry` computes which elements a coordinate owns; `local_shards` asks it for a layout.
- `mesh` is what we ask of torch's DeviceMesh; `notation` prints `f32[8@dp, 4@tp]`.
- `protocol` and `rng_layout` say the same to other packages (`__vescale_layout__`).
"""
