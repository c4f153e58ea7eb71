"""The errors of this package. The same names are in `vescale_rng`."""

from vescale_rng._errors import (
    DeviceError,
    DistributionError,
    LayoutError,
    PolicyError,
    RngError,
    StateError,
)

__all__ = [
    "DeviceError",
    "DistributionError",
    "LayoutError",
    "PolicyError",
    "RngError",
    "StateError",
]
