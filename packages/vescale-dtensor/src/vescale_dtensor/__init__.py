"""One tensor over many devices, with the semantics of one device."""

from vescale_dtensor._version import __version__

__all__ = ["__version__"]
