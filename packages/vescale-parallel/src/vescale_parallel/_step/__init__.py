"""One call of a training step whose batch is computed in parts, whoever computes them.

Top to bottom (imports point down):

- `forward_backward`: the public function. What `parallelize` has installed on the model computes
  the step; a model without such a thing runs once, on the whole batch.
- `parts`: arguments cut into parts by rows, and what `loss=` means.
"""
