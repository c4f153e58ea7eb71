"""In which module of the model a recorded call runs, for the labels of a program's steps."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


class ModuleNames:
    """Names of the modules whose `forward` is running, as the outermost of them calls them."""

    def __init__(self) -> None:
        # By id, with the module, whose id nobody else has as long as it is kept: a recording only.
        self._names: dict[int, tuple[nn.Module, dict[int, str]]] = {}

    def now(self) -> str:
        """The name of the innermost module that runs, like "blocks.0.attention".

        Empty in the outermost module's own code, outside of modules, and in a module that the
        outermost one does not hold.
        """
        running = _running()
        if len(running) < 2:
            return ""
        names = self._names_in(running[-1])
        return next((names[id(one)] for one in running if id(one) in names), "")

    def _names_in(self, root: nn.Module) -> dict[int, str]:
        if id(root) not in self._names:
            names = {id(module): name for name, module in root.named_modules()}
            self._names[id(root)] = root, names
        return self._names[id(root)][1]


def _running() -> list[nn.Module]:
    """The modules whose `forward` is running, innermost first."""
    found = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        # Only of such frames are the locals asked for: before Python 3.13 that makes a dict, which
        # holds them until the frame ends.
        if frame.f_code.co_name == "forward":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                found.append(module)
        frame = frame.f_back
    return found
