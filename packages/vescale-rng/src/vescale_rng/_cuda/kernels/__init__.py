"""Triton kernels of the native CUDA policy. Nothing imports triton before a kernel is asked for.

Reading guide: `launch` turns a span, a recipe and a place in the stream into one launch of the
kernel in `fill`, which takes its words from `words` and makes numbers of them by `transforms`.
`math` holds the functions whose bits depend on the device.
"""

from functools import cache
from importlib.util import find_spec


@cache
def have_triton() -> bool:
    """Tell whether the triton package is installed."""
    return find_spec("triton") is not None
