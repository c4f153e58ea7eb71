"""Computing without a history, which costs nothing where there is none anyway."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NOTHING = nullcontext()


def unrecorded() -> AbstractContextManager[Any]:
    """As `torch.no_grad()`, whose every use is several calls of Python, if anything is recorded.

    A backward mostly records nothing, and goes through this for each unit several times.
    """
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING
