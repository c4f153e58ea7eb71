"""Checkpoints that cannot be half-written, silently wrong, or tied to a mesh."""

from vescale_ckpt._version import __version__

__all__ = ["__version__"]
