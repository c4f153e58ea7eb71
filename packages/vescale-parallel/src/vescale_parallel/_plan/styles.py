"""The words of Hugging Face's tensor parallel plans, and the roles that they mean.

Source: `transformers.distributed.tensor_parallel` and `expert_parallel` (5.23), and
`transformers.integrations.tensor_parallel` (4.51 to 4.57) for those that have gone since.

A style there says how parameters are sharded and what its hooks do with plain tensors. Only the
first is needed here: distributed tensors know what they are, so gathers and sums follow.
"""

from typing import Final

from vescale_parallel._common.messages import did_you_mean, listed
from vescale_parallel._errors import PlanError
from vescale_parallel._plan.layers import Role

ROLES: Final = {
    "colwise": Role.COLUMN,
    "colwise_rep": Role.COLUMN,
    "colwise_gather_output": Role.COLUMN,
    "local_colwise": Role.COLUMN,
    "packed_colwise": Role.COLUMN,
    "local_packed_colwise": Role.COLUMN,
    "rowwise": Role.ROW,
    "rowwise_rep": Role.ROW,
    "rowwise_split_input": Role.ROW,
    "local_rowwise": Role.ROW,
    "packed_rowwise": Role.ROW,
    "local_packed_rowwise": Role.ROW,
    "embedding_rowwise": Role.VOCABULARY,
    "embedding_colwise": Role.FEATURES,
    "replicate": Role.REPLICATED,
    "replicated": Role.REPLICATED,
    "replicated_with_grad_allreduce": Role.REPLICATED,
    "sequence_parallel": Role.REPLICATED,
    "mla_kv_a_proj": Role.REPLICATED,
}
"""Style to role of the parameters that it names."""

HOOKS: Final = {
    "all_reduce",
    "moe_tp_experts",
    "moe_identity_expert",
    "local_params",
    "local",
    "gather",
    "isolated",
    "ep_dispatch_experts",
    "ep_router",
}
"""Styles that shard nothing: what they do with plain tensors, distributed ones do by themselves."""

EXPERTS: Final = {"grouped_gemm"}
"""Styles that shard a stack of experts over its first dim."""


def role_of(name: str, style: str) -> Role | None:
    """Return the role that a style means, or None where it shards nothing.

    Raises:
        PlanError: nobody here knows the style.
    """
    if style in ROLES:
        return ROLES[style]
    if style in HOOKS:
        return None
    known = [*ROLES, *HOOKS, *EXPERTS]
    raise PlanError(
        f"the model declares '{name}': '{style}', and no layout is known for that style."
        f"{did_you_mean(style, known)} Known are {listed(known, limit=40)}. Write a rule for it: "
        "Plan.from_hf(model, styles={...: 'colwise'}) replaces what the model declares."
    )
