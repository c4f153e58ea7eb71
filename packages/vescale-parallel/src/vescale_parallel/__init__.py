"""A plan turns a model into its parallel self, and a trainer runs it.

How a call goes through the rooms, top to bottom (imports point the same way):

- `_cli/`, `__main__`: `python -m vescale_parallel plan`, a plan checked and priced on paper.
- `cost`: steps priced on paper for the shapes of Llama 3: `python -m vescale_parallel.cost`.
- `integrations/`: other people's trainers, each imported when it is first needed.
- `train/`: the example trainer; it uses nothing that users cannot call.
- `_data/`: `loader`, batches that every rank reads its rows of.
- `_apply/`: `parallelize`, the one entry point that changes a model: what is asked of all ranks
  before, and what is installed: distributed parameters, hooks, the summation of gradients.
- `_static/`: forwards that are captured once and replayed: `parallelize(..., static=True)`.
- `_plan/`: `Plan`, and plans that nobody has to write: presets by declared layouts or by shapes.
- `_check/`: text of a plan -> parsed rules -> rules resolved for a model and a mesh: a `Report`.
- `_checkpoint/`: modules that are computed again in backward.
- `_invariant/`: steps with the same bits on any number of data-parallel ranks.
- `_cost/`: what a step of a resolved plan would cost on a cluster, on paper.
- `memory`, `_memory/`: order and layout of what a torch.fx graph makes; they stand by themselves.
- `schedules`, `_schedules/`: pipeline schedules on paper; they stand by themselves, too.
- `_experts/`: experts over ranks: tokens are sent to those that they chose; `MoE`, a layer.
- `_local_rows/`: functions whose rows do not know of each other compute on each rank's own.
- `_deferred/`: models that are built without storage, and made on each rank piece by piece.
- `_pretrained/`: weights in Hugging Face's layout; each rank reads what it stores.
- `_pipeline/`: stages of a model that nobody split, run by a schedule.
- `_zero/`: parameters that are stored as shards, gathered while their module runs.
- `_step/`: `forward_backward`, a training step in one call.
- `_notation/`: the two small languages that rules are written in, and the rows of a report.
- `_common/`, `_errors`: what all of them stand on: the mesh, agreement between ranks, messages.
"""

from vescale_parallel import _torch_versions as _torch_versions
from vescale_parallel._apply.move_experts import balance_experts
from vescale_parallel._apply.no_sync import no_sync
from vescale_parallel._apply.parallelize import parallelize
from vescale_parallel._apply.through_forward import through_forward
from vescale_parallel._check.report import Report
from vescale_parallel._common.mesh import mesh
from vescale_parallel._data.loader import Loader, loader
from vescale_parallel._deferred.models import deferred, materialize
from vescale_parallel._errors import (
    DeferredError,
    DisagreementError,
    GraphError,
    MemoryPlanError,
    MeshError,
    ParallelError,
    PipelineError,
    PlanError,
    PretrainedError,
    StaleParameterError,
    TrainError,
)
from vescale_parallel._experts.losses import balance_loss, z_loss
from vescale_parallel._experts.moe import Experts, MoE
from vescale_parallel._experts.router import Router, Routing
from vescale_parallel._invariant.norm import clip_grad_norm_
from vescale_parallel._invariant.sums import sum_over_shards
from vescale_parallel._local_rows.declare import local_rows
from vescale_parallel._local_rows.prove import check_local_rows
from vescale_parallel._notation.rows import BoundaryRow, ParameterRow
from vescale_parallel._plan.fields import Invariant, Pipeline, Zero
from vescale_parallel._plan.plan import Plan
from vescale_parallel._pretrained.load import load_pretrained
from vescale_parallel._pretrained.save import save_pretrained
from vescale_parallel._static.units import CapturedUnit, captured_units
from vescale_parallel._step.distribute_batch import distribute_batch
from vescale_parallel._step.forward_backward import forward_backward
from vescale_parallel._version import __version__
from vescale_parallel._zero.resolve import BufferRow

__all__ = [
    "BoundaryRow",
    "BufferRow",
    "CapturedUnit",
    "DeferredError",
    "DisagreementError",
    "Experts",
    "GraphError",
    "Invariant",
    "Loader",
    "MemoryPlanError",
    "MeshError",
    "MoE",
    "ParallelError",
    "ParameterRow",
    "Pipeline",
    "PipelineError",
    "Plan",
    "PlanError",
    "PretrainedError",
    "Report",
    "Router",
    "Routing",
    "StaleParameterError",
    "TrainError",
    "Zero",
    "__version__",
    "balance_experts",
    "balance_loss",
    "captured_units",
    "check_local_rows",
    "clip_grad_norm_",
    "deferred",
    "distribute_batch",
    "forward_backward",
    "load_pretrained",
    "loader",
    "local_rows",
    "materialize",
    "mesh",
    "no_sync",
    "parallelize",
    "save_pretrained",
    "sum_over_shards",
    "through_forward",
    "z_loss",
]
