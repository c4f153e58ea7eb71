"""A plan turns a model into its parallel self, and a trainer runs it.

How a call goes through the files, top to bottom (imports point the same way):

- `_cli/`, `__main__`: `python -m vescale_parallel plan`, a plan checked and priced on paper.
- `train/`: the example trainer; it uses nothing that users cannot call.
- `_parallelize`: the one entry point that changes a model. It asks, in this order:
- `_plans/`: plans that nobody has to write: presets by declared layouts and by shapes, edits.
- `_plan`, `_check`, `_rules`, `_report`: text of a plan -> parsed rules -> rules resolved for a
  model and a mesh. `_glob` and `_layout` are the two small languages that rules are written in.
- `_cost`, `cost`: what a step of a resolved plan would cost on a cluster, on paper.
- `_preflight`, `_facts`: do all ranks pass the same, before anything is changed?
  `_agreement` is how they find out, there and for the first batches.
- `_placements`, `_boundaries`, `_gradients`: what is installed: distributed parameters, hooks at
  module boundaries, the summation of gradients in buckets.
- `_zero/`: parameters that are stored as shards, gathered while their module runs; `_no_sync`.
- `_optimizers`, `_replaced`: what happens to those who hold the plain parameters.
- `_mesh`, `_pytree`, `_messages`, `_errors`: what all of them stand on.
"""

from vescale_parallel._errors import (
    DisagreementError,
    MeshError,
    ParallelError,
    PlanError,
    StaleParameterError,
    TrainError,
)
from vescale_parallel._mesh import mesh
from vescale_parallel._no_sync import no_sync
from vescale_parallel._parallelize import parallelize
from vescale_parallel._plan import Plan
from vescale_parallel._report import Report
from vescale_parallel._report_rows import BoundaryRow, ParameterRow
from vescale_parallel._version import __version__
from vescale_parallel._zero.resolve import BufferRow

__all__ = [
    "BoundaryRow",
    "BufferRow",
    "DisagreementError",
    "MeshError",
    "ParallelError",
    "ParameterRow",
    "Plan",
    "PlanError",
    "Report",
    "StaleParameterError",
    "TrainError",
    "__version__",
    "mesh",
    "no_sync",
    "parallelize",
]
