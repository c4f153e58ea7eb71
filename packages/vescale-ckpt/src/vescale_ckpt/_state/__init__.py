"""A state as a tree of JSON nodes, and its tensors by name.

Reading guide: `values` has the marks that a user puts into a state (`RankLocal`, `Replicated`,
`WHOLE`) and the JSON form of plain values; `state_keys` gives every leaf a unique name. `flatten`
takes a state apart, `merge` makes one tree of all ranks' trees, `rebuild` makes Python containers
of a tree, and `select` takes a part of one or moves subtrees. `optimizer` gives an optimizer the
state that a checkpoint can be loaded into.
"""
