"""Keeps `torch.compile` out of functions: its graph breaks there, and it calls them as is."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from vescale_dtensor._torch.compat import compiler_callback

Function = TypeVar("Function", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")

is_compiling = torch.compiler.is_dynamo_compiling
"""Whether torch.compile traces the line that asks. The other tracers are dispatch modes."""


def breaks_graph(reason: str) -> Callable[[Function], Function]:
    """`torch.compiler.disable(reason=...)`, of which importing this package does not pay the price.

    The decorator itself imports torch._dynamo, which sets an environment variable, replaces
    `torch.manual_seed` and takes a second. It is asked for at the first call, which only the
    compiler makes; until then, the compiler finds the two marks by which it knows such functions.
    """

    def decorate(function: Function) -> Function:
        eager: Function | None = None

        @wraps(function)
        def outside(*args: Any, **kwargs: Any) -> Any:
            nonlocal eager  # and no list: torch 2.11's compiler warns that it cannot trace `append`
            if eager is None:
                disable: Any = torch.compiler.disable
                eager = disable(function, reason=reason)
            assert eager is not None
            return eager(*args, **kwargs)

        marked: Any = outside
        marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, reason
        return marked  # type: ignore[no-any-return]

    return decorate


def is_compiled() -> bool:
    """Whether torch.compile traces, or runs, the line that asks.

    It also runs frames that it gave up to trace, and looks into every function that these call.
    """
    return is_compiling() or compiler_callback() is not None


@breaks_graph("this code works on DTensors themselves and is run as it is: without fullgraph=True")
def eagerly(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function that `torch.compile` does not look into, nor into what it calls."""
    return function(*args, **kwargs)


def untraced(function: Function) -> Function:
    """A function, or method, that `torch.compile` calls as it is, with all that it calls.

    As `torch.compiler.disable`, but outside of compiled regions it costs one call more and nothing
    else: torch._dynamo is not imported for it, and no state of the compiler is changed. For hooks
    and forwards that work on the wrappers of DTensors, which a compiler cannot follow.

    Examples:
        @untraced
        def hook(module, args):
            return tuple(one.redistribute(placements=[Replicate()]) for one in args)
    """

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        # `is_compiled` written out: hooks of all modules come here.
        if is_compiling() or compiler_callback() is not None:
            return eagerly(function, *args, **kwargs)
        return function(*args, **kwargs)

    made: Any = called
    return made  # type: ignore[no-any-return]
