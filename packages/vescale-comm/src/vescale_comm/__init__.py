"""Collectives that are typed, fused, ordered, compressed, traced and simulated."""

from vescale_comm._version import __version__

__all__ = ["__version__"]
