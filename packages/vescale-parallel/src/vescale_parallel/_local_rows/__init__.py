"""Functions whose rows do not know of each other compute on each rank's own rows.

An operator that looks across rows (a sort, `nonzero`, a masked selection, `index_add_`) gathers
them, as nobody can tell from the operator that what is made of its result is about one row again.
Whoever wrote the function can: here that is said, and may be proven.

Top to bottom (imports point down):

- `prove`: a batch through a model, with every such function compared with its parts.
- `declare`: `local_rows`, for functions; and the forward of modules that a plan names.
- `call`: one call: what enters, whole or by rows, and what leaves.
- `parts`: one call as one device makes it, whole and in parts, and how the two differ.
- `resolve`: a plan's globs and a model -> names of modules, or what is wrong.
"""
