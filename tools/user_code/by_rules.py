"""Tensor and sequence parallel and ZeRO-3, by rules, of a model file that knows nothing of it."""

from torch import nn
from vescale_parallel import Plan, mesh, parallelize

PLAN = Plan(
    parameters={
        "*{embed_tokens,lm_head}.weight": "tp:0",
        "*.{q,k,v,gate,up}_proj.weight": "tp:0",
        "*.{o,down}_proj.weight": "tp:1",
        "*": "replicate",
    },
    activations={
        "*embed_tokens": "-> tp:1",
        "*.{self_attn,mlp}": "tp:full ->",
        "*.{o,down}_proj": "-> tp:1",
        "lm_head": "tp:full ->",
    },
    zero=3,
)


def distributed(model: nn.Module, tp: int) -> nn.Module:
    """The model over all processes."""
    return parallelize(model, mesh(dp=-1, tp=tp), PLAN)
