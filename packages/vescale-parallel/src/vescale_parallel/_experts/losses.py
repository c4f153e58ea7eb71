"""Losses of a router, over all tokens of the batch; ordinary functions of tensors.

Of distributed tensors they are those of the global batch, as every sum is.
"""

from torch import Tensor

from vescale_parallel._experts.router import Routing


def balance_loss(routing: Routing) -> Tensor:
    """Return the load balancing loss of the Switch Transformer: 1 where all experts have as many.

    The number of experts, times the sum over them of the share of choices that go to one and the
    mean probability that it has. Only the latter has a gradient.
    """
    experts = routing.logits.shape[-1]
    shares = routing.load()[:experts] / routing.chosen.numel()
    means = routing.logits.softmax(dim=-1).mean(dim=0)
    return experts * (shares * means).sum()


def z_loss(routing: Routing) -> Tensor:
    """Return the mean of the squared logarithm of the sum of exponentials of the logits."""
    return routing.logits.logsumexp(dim=-1).square().mean()
