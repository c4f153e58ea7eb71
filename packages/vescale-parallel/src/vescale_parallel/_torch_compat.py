"""What this package needs of torch that torch does not document, each with what happens without.

- `hooks_of`: whether a tensor has hooks. Without the two attributes it finds none, and hooks that
  were registered before `parallelize` stay behind on the plain parameter.
"""

from torch import Tensor


def hooks_of(tensor: Tensor) -> list[str]:
    """The methods by which hooks of a leaf were registered; empty where it has none."""
    kinds = {
        "_backward_hooks": "register_hook",
        "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
    }
    return [method for attribute, method in kinds.items() if getattr(tensor, attribute, None)]
