"""Calls of functions of these packages, counted: times depend on what else a machine does."""

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any


def counted(step: Callable[[], Any]) -> Counter[str]:
    """Calls in a step, backward included: of which function, and the last part of its path."""
    found: Counter[str] = Counter()

    def called(frame: FrameType, event: str, argument: Any) -> None:
        _, inside, file = frame.f_code.co_filename.rpartition("/vescale_")
        if event == "call" and inside:
            found[f"{file}:{frame.f_code.co_name}"] += 1

    gc.collect()
    gc.disable()  # finalizers come when it pleases the collector
    sys.setprofile(called)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found
