"""Records what a forward of a stage reads, returns and writes.

In: values and calls of one forward. Out: `Kind`, all that stages have to know of microbatches of
the same shapes.

Top to bottom (imports point down):

- `results`: results that one forward of a stage passes on or takes.
- `foreign_values`: marks values of other stages, and what is computed from them. `leaks`: finds
  those that leave a block beside its result. `module_attributes`: those that stay in attributes of
  its modules.
- `route`: the calls of units that one forward records and the next one follows.
  `argument_positions`: where among their arguments tensors are that pass between stages.
  `unit_calls`: the units that were called, and their order.
- `loss_dependence`: on which tensors between stages the loss depends.
- `microbatch_kinds`: what all stages know of a kind of microbatch.
- `hook_results`: results within blocks that hooks bring to code outside.
- `module_state`: attributes and buffers that forwards write. `streams`: positions in the random
  streams.
- `text`: all of it as JSON. `tensor_specs`: a tensor as metadata, and placeholders for it.
  `placeholders`: placeholders that notice functions.
"""
