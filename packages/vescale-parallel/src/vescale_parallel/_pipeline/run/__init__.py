"""Runs the actions of a schedule on one rank: forwards, backwards and messages.

In: a schedule, microbatches and what is known of their kinds. Out: the losses of the last stage,
and gradients on each stage.

Top to bottom (imports point down):

- `trial_run`: one forward of all stages for a new kind of microbatch, which finds out what they
  exchange and draw.
- `runner`: the actions of a schedule, and what happens where one of them fails.
- `stage`: one forward of one stage. `route_calls`: its calls of units where no function is watched.
- `boundary`: what passes to the next stage, checked.
- `halves`: a backward in two, of what was received and of parameters. `backward_cut`: where it is
  divided.
- `measurements`: what stages take and keep, and the schedule that follows from it.
- `state_writes`: state that forwards write, by stage.
- `messages`: tensors and small objects between neighbours, in the order of the schedule.
- `rank_stages`: the stages of a rank. `stage_parameters`: their parameters while they run.
- `local_steps`: optimizers step what a rank has as plain tensors. `optimizer_watch`: whether one
  has stepped the model.
"""
