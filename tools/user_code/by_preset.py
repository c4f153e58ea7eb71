"""The same of a Hugging Face model, whose configuration says how it is laid out."""

from torch import nn
from vescale_parallel import Plan, mesh, parallelize


def distributed(model: nn.Module, tp: int) -> nn.Module:
    """The model over all processes."""
    plan = Plan.from_hf(model, sequence_parallel=True, zero=3)
    return parallelize(model, mesh(dp=-1, tp=tp), plan)
