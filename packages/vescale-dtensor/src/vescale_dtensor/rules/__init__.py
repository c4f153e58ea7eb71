"""The public interface for adding operators: the types of a rule, and a check that it is right.

A *rule* (`Rule`) is a function from a call (`OpCall`) to data (`Strategy`), which says in which
ways the function may run on local tensors. Nine functions in ten need letters for their dims and
nothing else (`Signature`):

    scale = Signature((("r", "c"), ("c",)), (("r", "c"),))  # x[r, c], w[c] -> y[r, c]
    register_rule(torch.ops.mylib.scale, Rule("scale", lambda call: scale.strategy()))
    check_rule(torch.ops.mylib.scale, [(torch.randn(5, 4), torch.randn(4))])

For what letters cannot say, there are candidates (`AxisStrategy`: a placement per operand and
output on one mesh axis, where `Shard(dim)` stands for any sharding of that dim), and a local kernel
that runs in place of the function and may communicate: it gets layouts from a `LocalContext`, and
can use the helpers below. Backward needs no rule: autograd runs on the local tensors.

- `register_rule`, `register_sharding` (takes rules written for torch's DTensor), `check_rule`.
- `sharded_dim_strategy`: candidates for an op that reduces or scans along a sharded dim. In its
  kernel, `sharding_axes` are the mesh axes to communicate over, `sum_over_axes` and
  `gather_stacked` do so, `local_offsets` is where this rank's shard begins, and `as_partial_value`
  keeps the gradient of a result that every rank has from being counted once per rank.
- `pad_empty_shards`: a kernel for functions that refuse empty tensors.
- `overridable`: lets `capture` record a kernel's own `autograd.Function` as one call.

docs/adding-an-operator.md has a worked example.
"""

from __future__ import annotations

from vescale_dtensor._errors import RuleCheckError, RuleError
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._ops.common.empty_shards import pad_empty_shards
from vescale_dtensor._ops.common.sharded_dim import (
    as_partial_value,
    gather_stacked,
    local_offsets,
    sharded_dim_strategy,
    sharding_axes,
    sum_over_axes,
)
from vescale_dtensor._planning.local_context import LocalContext
from vescale_dtensor._planning.op_call import OpCall, Reads
from vescale_dtensor._planning.plan import Rule
from vescale_dtensor._planning.strategy import AxisStrategy, Dims, Signature, Strategy
from vescale_dtensor._torch.overridable import overridable
from vescale_dtensor.rules._check import check_rule
from vescale_dtensor.rules._check_report import Outcome, RuleReport, Trial
from vescale_dtensor.rules._check_trial import Sample
from vescale_dtensor.rules._registration import register_rule
from vescale_dtensor.rules._torch_sharding import OperandInfo, register_sharding

__all__ = [
    "AxisStrategy",
    "Dims",
    "Layout",
    "LocalContext",
    "OpCall",
    "OperandInfo",
    "Outcome",
    "Reads",
    "Rule",
    "RuleCheckError",
    "RuleError",
    "RuleReport",
    "Sample",
    "Signature",
    "Strategy",
    "Trial",
    "as_partial_value",
    "check_rule",
    "gather_stacked",
    "local_offsets",
    "overridable",
    "pad_empty_shards",
    "register_rule",
    "register_sharding",
    "sharded_dim_strategy",
    "sharding_axes",
    "sum_over_axes",
]
