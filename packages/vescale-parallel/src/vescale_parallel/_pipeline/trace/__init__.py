"""Records what a forward of a stage reads, returns and writes.

In: values and calls of one forward. Out: `Kind`, all that stages have to know of microbatches of
the same shapes.

Top to bottom (imports point down):

- `results`: results that one forward of a stage passes on or takes.
- `foreign`: marks values of other stages, and what is computed from them. `leaks`: finds those that
  leave a block beside its result. `left`: those that stay in attributes of its modules.
- `route`: the calls of units that one forward records and the next one follows. `same_arguments`:
  where among their arguments tensors are that pass between stages. `called`: the units that were
  called, and their order.
- `used`: on which tensors between stages the loss depends.
- `kinds`: what all stages know of a kind of microbatch.
- `collected`: results within blocks that hooks bring to code outside.
- `state`: attributes and buffers that forwards write. `streams`: positions in the random streams.
- `text`: all of it as JSON. `described`: a tensor as metadata, and placeholders for it.
  `standing`: placeholders that notice functions.
"""
