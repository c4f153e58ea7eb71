"""Ends what a forward has begun where the program is interrupted amid it, as by Ctrl-C.

torch calls the `always_call` hooks of a module behind an `Exception`, and behind no other
`BaseException`: whoever goes on then, as in the next cell of a notebook, would find the module as
it is amid a forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any

import torch
from torch import nn

from vescale_parallel._common.pickle_refusal import NotPickled

_is_compiling = torch.compiler.is_dynamo_compiling


class Interruptible(NotPickled):
    """Takes the place of a module's `forward`, as an attribute of the module.

    Args:
        module: it.
        forward: what it computes by.
        ends: are called where that is interrupted.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], ends: Sequence[Callable[[], None]]
    ) -> None:
        # So that who looks at its signature sees the model's.
        update_wrapper(self, forward, updated=())
        self.module, self.forward, self.ends = module, forward, tuple(ends)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute."""
        if _is_compiling():
            return self.forward(*args, **kwargs)
        try:
            return self.forward(*args, **kwargs)
        except Exception:
            raise
        except BaseException:
            for end in self.ends:
                end()
            raise


def let_end(module: nn.Module, ends: Sequence[Callable[[], None]]) -> None:
    """From now on a forward of the module that is interrupted calls these."""
    module.forward = Interruptible(module, module.forward, ends)


def is_running(module: nn.Module) -> bool:
    """Whether a forward of a module that `let_end` got runs in this thread.

    One that was interrupted in another hook, before it began, does not.
    """
    frame = inspect.currentframe()
    while frame is not None:
        # Locals are asked for behind the code: that copies them.
        is_forward = frame.f_code is Interruptible.__call__.__code__
        if is_forward and frame.f_locals["self"].module is module:
            return True
        frame = frame.f_back
    return False
