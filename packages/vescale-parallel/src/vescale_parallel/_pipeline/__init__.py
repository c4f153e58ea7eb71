"""Pipeline parallelism at run time: stages of a model that nobody split, run by a schedule.

Every rank runs the model's own forward. What lies on other stages is stood in for: its modules
return values that are known to be none, and skip what they would have drawn. The arguments with
which the model calls the first block of a stage come from the stage before; at the call of the
first block of the next stage this one sends them, and its forward ends there.

Top to bottom (imports point down):

- `step`: what `forward_backward` calls of a model in stages, or with microbatches.
- `runner`: the actions of a schedule on one rank, and what happens where one of them fails.
- `halves`: a backward in two, of what was received and of parameters.
- `measured`: what stages take and keep, and the schedule that follows from it.
- `outputs`: what the model returns, for ranks whose stage is not the last.
- `finish`: losses and gradients of all stages put together.
- `rehearsal`: what stages exchange and draw for a kind of microbatch, found out by one forward.
- `used`: from which of it gradients come back.
- `stage`: one forward of one stage; `scene`: what it works on; `units`: what takes the place of
  forwards, through which it acts. `route`: the calls of units that one forward notes and the next
  one follows. `quiet`: such calls where no function has to be watched; `same_arguments`: where in
  them tensors are that pass between stages. `called`: which units were called otherwise.
  `boundary`: what passes to the next stage.
- `collected`: what hooks within blocks bring to code outside; `results`: how that passes between
  stages; `kinds`: what all stages know of a kind of microbatch.
- `state`: attributes and buffers that forwards write. `written`: by which stage, and told to all.
- `foreign`: values of other stages, and what is computed from them. `leaks`: what gets out of
  blocks beside their results. `left`: what of it stays in attributes of their modules.
- `messages`: tensors and small objects between neighbours, in the order of the schedule.
- `text`: what stages tell each other, as JSON.
- `described`: a tensor as metadata, and back. `streams`: places in the random streams.
- `held`: the parameters of a rank's stages while they run.
- `walked`: modules and parameters of the model, in a step.
- `local_steps`: optimizers step what a rank has as plain tensors. `stepped`: whether one has
  stepped the model.
- `split`: a model into stages. `order`: where it uses what lies around its blocks. `rules`: words
  of a plan. `given`: the schedule that it asks for.

`_apply.pipeline_install` makes a model of stages of these.
"""
