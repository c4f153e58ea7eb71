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
from vescale_rng._factories import rand, randint, randn
from vescale_rng._fill import fill_
from vescale_rng._generator_state import Position
from vescale_rng._layout import Box, BoxLike, Layout, LayoutLike, whole
from vescale_rng._placements import layout_of
from vescale_rng._policy import policy, use
from vescale_rng._positions import advance, at, draws, position, seek, skip
from vescale_rng._state import get_state, set_state
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
    "Position",
    "RandInt",
    "Random",
    "RngError",
    "StateError",
    "Uniform",
    "__version__",
    "advance",
    "at",
    "draws",
    "dropout",
    "fill_",
    "get_state",
    "layout_of",
    "layout_of_tensor",
    "policy",
    "position",
    "rand",
    "randint",
    "randn",
    "seek",
    "set_state",
    "skip",
    "use",
    "whole",
]
