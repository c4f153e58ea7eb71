"""Random numbers of a piece of a tensor, equal to those of the whole."""

from vescale_rng._version import __version__

__all__ = ["__version__"]
