"""Random numbers of a piece of a tensor, equal to those of the whole."""

from vescale_rng._adapters import layout_of_tensor
from vescale_rng._distributions import (
    Bernoulli,
    Cauchy,
    Distribution,
    Exponential,
    Geometric,
    LogNormal,
    Normal,
    RandInt,
    Random,
    Uniform,
)
from vescale_rng._dropout import dropout
from vescale_rng._errors import (
    DeviceError,
    DistributionError,
    LayoutError,
    PolicyError,
    RngError,
    StateError,
)
from vescale_rng._fill import fill_
from vescale_rng._layout import Box, BoxLike, Layout, LayoutLike, whole
from vescale_rng._placements import layout_of
from vescale_rng._policy import policy, use
from vescale_rng._version import __version__

__all__ = [
    "Bernoulli",
    "Box",
    "BoxLike",
    "Cauchy",
    "DeviceError",
    "Distribution",
    "DistributionError",
    "Exponential",
    "Geometric",
    "Layout",
    "LayoutError",
    "LayoutLike",
    "LogNormal",
    "Normal",
    "PolicyError",
    "RandInt",
    "Random",
    "RngError",
    "StateError",
    "Uniform",
    "__version__",
    "dropout",
    "fill_",
    "layout_of",
    "layout_of_tensor",
    "policy",
    "use",
    "whole",
]
