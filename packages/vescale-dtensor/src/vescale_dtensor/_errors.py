"""The one exception family of this package."""

from __future__ import annotations


class DTensorError(Exception):
    """Base of every error that vescale_dtensor raises on purpose."""


class LayoutError(DTensorError, ValueError):
    """A layout that cannot be: a wrong dim, a wrong number of placements, sizes that disagree."""


class UnsupportedError(DTensorError):
    """Something that would be silently wrong if it went on; the message names the way round it.

    It is no `NotImplementedError`: torch swallows those in places (parametrizations) and goes on.
    """


class MeshError(DTensorError, ValueError):
    """Operands that live on different meshes, or a mesh that does not fit."""


class DisagreementError(DTensorError, ValueError):
    """Ranks hold different values of what has to be the same on all of them."""


class StrictError(DTensorError, RuntimeError):
    """Something that is right but slow, and that `strict()` was asked to refuse."""


class CaptureError(DTensorError, RuntimeError):
    """A function that `capture` cannot record, or a program that differs from its function."""


class RuleError(DTensorError, TypeError):
    """A rule, or a function to register one for, that is not what it has to be."""


class RuleCheckError(DTensorError, AssertionError):
    """A rule whose results or gradients differ from those of one device; see `check_rule`."""
