"""A plan turns a model into its parallel self, and a trainer runs it."""

from vescale_parallel._version import __version__

__all__ = ["__version__"]
