"""The one module that looks behind torch's public API; each look is tested for, with a fallback."""

from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

unseen: Any = torch._C.DisableTorchFunction
"""Context in which torch function modes see nothing."""


def process_group_count() -> int | None:
    """Returns how many process groups this process is a member of; None where torch hides it."""
    names = getattr(getattr(c10d, "_world", None), "pg_names", None)
    return None if names is None else len(names)
