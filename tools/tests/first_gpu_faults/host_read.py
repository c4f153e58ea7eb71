"""A norm looks at a value, for which the host has to wait."""

from torch import nn

right = nn.LayerNorm.forward


def wrong(self, x):
    assert float(x.detach().abs().amax()) < 1e30
    return right(self, x)


nn.LayerNorm.forward = wrong
