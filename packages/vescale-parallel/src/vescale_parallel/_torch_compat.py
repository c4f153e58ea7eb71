"""What this package needs of torch that torch does not document, each with what happens without.

- `hooks_of`: whether a tensor has hooks. Without the two attributes it finds none, and hooks that
  were registered before `parallelize` stay behind on the plain parameter.
- `no_torch_function`: a context in which torch function modes see nothing, for checks that are no
  part of what a mode records. Without it they are seen, and `capture` refuses what it sees of them.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

no_torch_function: Any = getattr(torch._C, "DisableTorchFunction", nullcontext)


def hooks_of(tensor: Tensor) -> list[str]:
    """The methods by which hooks of a leaf were registered; empty where it has none."""
    kinds = {
        "_backward_hooks": "register_hook",
        "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
    }
    return [method for attribute, method in kinds.items() if getattr(tensor, attribute, None)]
