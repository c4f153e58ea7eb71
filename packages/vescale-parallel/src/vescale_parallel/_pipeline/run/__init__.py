"""Runs the actions of a schedule on one rank: forwards, backwards and messages.

In: a schedule, microbatches and what is known of their kinds. Out: the losses of the last stage,
and gradients on each stage.

Top to bottom (imports point down):

- `rehearsal`: one forward of all stages for a new kind of microbatch, which finds out what they
  exchange and draw.
- `runner`: the actions of a schedule, and what happens where one of them fails.
- `stage`: one forward of one stage. `quiet`: its calls of units where no function is watched.
- `boundary`: what passes to the next stage, checked.
- `halves`: a backward in two, of what was received and of parameters. `cut`: where it is divided.
- `measured`: what stages take and keep, and the schedule that follows from it.
- `written`: state that forwards write, by stage.
- `messages`: tensors and small objects between neighbours, in the order of the schedule.
- `scene`: the stages of a rank. `held`: their parameters while they run.
- `local_steps`: optimizers step what a rank has as plain tensors. `stepped`: whether one has
  stepped the model.
"""
