"""The plan of the example model: data, tensor and sequence parallel. All of it."""

from vescale_parallel._plan.plan import Plan

PLAN = Plan(
    axes=("dp", "tp"),
    batch="dp:0",
    parameters={
        "embed.weight": "tp:0",
        "*.{q,k,v,gate,up}.weight": "tp:0",
        "*.{out,down}.weight": "tp:1",
        "head.weight": "tp:0",
        "*norm.weight": "replicate",
    },
    activations={
        "embed": "-> tp:1",
        "blocks.*.{attention,mlp}": "tp:full -> tp:1",
        "head": "tp:full ->",
    },
)
