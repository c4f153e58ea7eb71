"""What this package needs of torch that torch does not document, each with what happens without.

- `hooks_of`: whether a tensor has hooks. Without the two attributes it finds none, and hooks that
  were registered before `parallelize` stay behind on the plain parameter.
- `no_torch_function`: a context in which torch function modes see nothing, for checks that are no
  part of what a mode records. Without it they are seen, and `capture` refuses what it sees of them.
- `in_backward`: whether a backward runs. Without it a recomputation counts as a forward: what it
  gathers is given back early, and gathered again.
- `after_backward`: called when the backward ends; torch drops what it was given where the backward
  raised. Without it what is still gathered then is given
  back at the next forward.
- `has_step_hooks`: whether an optimizer has hooks before its step. Without the attribute it is
  taken to have some, and Muon orthogonalises each matrix on every rank.
- `saved_tensors_hooks_now`: hooks that others have set on tensors that autograd saves. Without it
  ours would hide them, so activation checkpointing around a unit saves no memory.
- `FakeTensor`, `FakeTensorMode`: tensors without values, by which memory plans see what a graph
  makes. Documented as torch.compiler's fake tensors, imported from where torch itself has them.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "after_backward",
    "has_step_hooks",
    "hooks_of",
    "in_backward",
    "no_torch_function",
    "saved_tensors_hooks_now",
]

no_torch_function: Any = getattr(torch._C, "DisableTorchFunction", nullcontext)


def hooks_of(tensor: Tensor) -> list[str]:
    """Return the methods by which hooks of a leaf were registered; empty where it has none."""
    kinds = {
        "_backward_hooks": "register_hook",
        "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
    }
    return [method for attribute, method in kinds.items() if getattr(tensor, attribute, None)]


_task: Any = getattr(torch._C, "_current_graph_task_id", None)


def in_backward() -> bool:
    """Return whether this thread runs a backward."""
    return _task is not None and _task() != -1


def after_backward(call: Callable[[], None]) -> None:
    """Call a function when the backward that runs now has ended without an error."""
    engine = torch.autograd.Variable._execution_engine
    queue = getattr(engine, "queue_callback", None)
    if queue is not None:
        queue(call)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks run before this optimizer's step, beside those of all optimizers."""
    return bool(getattr(optimizer, "_optimizer_step_pre_hooks", True))


def saved_tensors_hooks_now() -> tuple[Any, Any] | None:
    """Return the innermost pair of hooks on tensors that autograd saves; None if none is set."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(True)
