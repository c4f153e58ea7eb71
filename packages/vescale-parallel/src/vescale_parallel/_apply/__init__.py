"""`parallelize`: the one entry point that changes a model, and what it installs.

Top to bottom (imports point down):

- `parallelize`: ask, agree, then distribute and install; what can be refused is refused before
  anything of the model has changed.
- `preflight`, `facts`: whether all ranks pass the same, before anything is changed.
- `experts_trial`: whether modules that a plan names as experts compute the same in parts.
- `zero_install`: parameters stored as shards, from a report to units and their schedule.
- `pipeline_install`: a model in stages: where parameters lie, what each rank installs.
- `boundaries`: hooks that redistribute what enters and leaves a module; `placements`: from layouts
  by axis name to placements on a mesh.
- `local_batch`: batches of which every rank passes its own rows.
- `gradients`: unreduced gradients summed in few, large collectives.
- `optimizers`, `replaced_parameters`: what happens to those who hold the plain parameters.
- `no_sync`: several backwards, whose gradients are reduced once.
"""
