"""Redistribution between layouts: plans, which are pure data, and their execution on local tensors.

Start at `plan`. A plan is made in three steps, none of which touches a tensor:

- `search` finds the sequence of `stages` (each a collective or local change from one of the
  `states` to the next, without any shape) that sends the fewest bytes by the model of `cost`.
- `lower` turns the stages into the `steps` of one rank, using `ownership` (which coordinate owns
  which elements) and `regions` (where these are in local memory). `lower_packed` does it for shards
  that are not boxes.
- `cross_mesh` plans redistributions between meshes that arrange the same ranks differently.

`execute` runs the steps, reducing halves as `half_sums` says. Autograd is added above, by
`_autograd/redistribute.py`.
"""
