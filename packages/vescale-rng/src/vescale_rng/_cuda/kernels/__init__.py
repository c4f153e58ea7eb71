"""Triton kernels. Nothing here imports triton before a kernel is asked for."""

from functools import cache
from importlib.util import find_spec


@cache
def have_triton() -> bool:
    """Whether the triton package is installed."""
    return find_spec("triton") is not None
