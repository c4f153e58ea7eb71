"""Groups of ranks: what every collective runs on.

Start with `group`: a `Group` is made from a torch process group by `as_group`, once for each.
`mesh_groups` finds or makes the group over one or several axes of a mesh, and `new_group` makes a
process group by its members only, without asking the rest of the world. `connection` knows which
groups have had the call in which NCCL makes their communicator.
"""
