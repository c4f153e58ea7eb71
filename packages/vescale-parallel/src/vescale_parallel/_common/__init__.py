"""Holds what every other room imports: the mesh, what ranks compare of tensors, messages.

- `mesh`: `mesh(dp=2, tp=2)`, and the sizes of a mesh's axes by name.
- `checksums`: tensors in words that ranks can compare, by `require_same` of
  `vescale_comm.agreement`.
- `messages`: lists of names, the names nearest to a wrong one, bytes as people read them.
- `numbers`: numbers on command lines, within bounds.
- `twins`: modules that compute with other tensors in the place of their parameters.
- `value_changes`: whether a tensor has other values than before.
- `interrupts`: what forwards have begun, ended also where the program is interrupted.
- `optimizer_hooks`: what hears of the steps of all optimizers. `plain_steps`: plain tensors that a
  helper steps in an optimizer's place.
- `pickle_refusal`: what is copied with a model, and not pickled.
- `torch_compat`: the one list of what is used of torch beyond its public API.
"""
