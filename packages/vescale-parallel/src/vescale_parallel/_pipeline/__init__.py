"""Runs stages of a model that nobody split, by a schedule.

Every rank runs the model's own forward. Modules of other stages return placeholders, and skip what
they would have drawn. The arguments with which the model calls the first block of a stage come from
the stage before; at the call of the first block of the next stage this one sends them, and its
forward ends there.

`_apply.pipeline_install` makes a model of stages of these: it puts a `StagedStep` on the model,
which `forward_backward(model, ...)` finds by `step_of(model)`.

A step, in the order in which files act:

1. `step`: `StagedStep.forward_backward`, of a model in stages; `microbatches`: the same of a model
   that only has microbatches.
2. `plan/`: what is known before a forward: the stages, the schedule, the model's parameters.
3. `run/`: one trial run for each kind of microbatch, then the actions of the schedule. `units`, the
   hooks on the modules, call the stage's forward that runs.
4. `trace/`: what such a forward records of the model, of values and of calls.
5. `finish/`: what ranks agree on, losses and gradients of all stages, outputs.

Imports run from `step` and `units` to `finish/`, `run/`, `trace/`, `plan/`, never back.
"""
