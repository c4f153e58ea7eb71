"""Draws of tensors without memory: torch's own call, which draws nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vescale_dtensor._planning import LocalContext

Local = Callable[[LocalContext, Any, Any], Any]


def nothing_on_meta(local: Local) -> Local:
    """A local call by which a tensor on the meta device leaves every generator as it is."""

    @wraps(local)
    def kernel(context: LocalContext, args: Any, kwargs: Any) -> Any:
        if args and getattr(args[0], "is_meta", False):
            return context.call.func(*args, **kwargs)
        return local(context, args, kwargs)

    return kernel
