"""Holds what every other room imports: the mesh, agreement between ranks, messages.

- `mesh`: `mesh(dp=2, tp=2)`, and the sizes of a mesh's axes by name.
- `agreement`: whether all ranks hold the same, told by a few bytes; who differs, where they do not
  (on what `vescale_comm.agreement` sends and hears).
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
