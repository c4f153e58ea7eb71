"""From one layout to another: a plan that is pure data, and its execution on local tensors.

`plan` is the entry. It is made in three steps, none of which touches a tensor:

1. `search` looks for the sequence of `stages` (each a collective from one state to the next, with
   no shape in it; see `states`) that sends the fewest bytes, which `cost` counts;
2. `lower` turns the stages into the `steps` of one rank, by `ownership` (who has which boxes) and
   `regions` (where those lie in local memory); `lower_packed` does it for what is no box;
3. `cross_mesh` handles meshes that arrange the same ranks otherwise.

`execute` runs the steps. No autograd here: `_autograd/redistribute.py` adds it.
"""
