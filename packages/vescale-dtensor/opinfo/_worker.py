"""A process that judges entries: one a line on its input, `LIBRARY NAME`; answers are JSON lines.

It says of every trial that it begins it, so that who reads knows what hung or crashed.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict
from types import ModuleType
from typing import Any

import torch
from _judge import Effort, Verdict, judge


def main() -> None:
    """Answer until the input ends. Arguments: samples per entry, and the seed."""
    effort = Effort(int(sys.argv[1]), int(sys.argv[2]))
    # What operators print goes elsewhere: the answers have this channel for themselves.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)

    def tell(**words: Any) -> None:
        channel.write(json.dumps(words) + "\n")

    tell(ready=True)
    for line in sys.stdin:
        library, name = line.rstrip("\n").split(" ", 1)
        effort.first_only = library == "stock"
        try:
            verdict = judge(name, _library(library), effort, lambda trial: tell(at=trial))
        except Exception:  # of this harness, not of an operator: to be seen, and not the end
            failure = {"trial": "", "ranks": "", "error": traceback.format_exc()}
            verdict = Verdict(name, "broken", failed=1, failures=[failure])
        tell(verdict=asdict(verdict))


def _library(word: str) -> ModuleType:
    if word == "stock":
        import torch.distributed.tensor

        return torch.distributed.tensor
    import vescale_dtensor

    return vescale_dtensor


if __name__ == "__main__":
    main()
