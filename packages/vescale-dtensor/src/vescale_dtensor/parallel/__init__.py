"""`torch.distributed.tensor.parallel` for these DTensors: the same names, the same signatures.

A plan gives submodules a style each. A style distributes parameters, and lays out inputs and
outputs of the submodule; what happens in between is the model's own forward. Everything here works
with plain local tensors between styles, as torch's recipes do, and with DTensors
(`use_local_output=False`), which also know uneven shards.

- `_parallelize`: `parallelize_module`: names in plans, and parameters that are shared.
- `_style`: `ParallelStyle`, the base, and what all styles do: lay out a tensor, distribute a
  parameter.
- `_layers`: styles of layers with parameters: `ColwiseParallel`, `RowwiseParallel`,
  `SequenceParallel`.
- `_boundaries`: styles of inputs and outputs only: `PrepareModuleInput` and its kin.
- `_loss`: `loss_parallel`.

`vescale_parallel.Plan` says more in fewer lines: sharded data, ZeRO, stages, and checks beforehand.
"""

from vescale_dtensor.parallel._boundaries import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from vescale_dtensor.parallel._layers import ColwiseParallel, RowwiseParallel, SequenceParallel
from vescale_dtensor.parallel._loss import loss_parallel
from vescale_dtensor.parallel._parallelize import parallelize_module
from vescale_dtensor.parallel._style import ParallelStyle

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]
