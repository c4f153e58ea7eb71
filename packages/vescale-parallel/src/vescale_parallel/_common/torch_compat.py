"""Lists what this package needs of torch's private API, and what happens without it.

- `hooks_of`, `any_hooks`: whether a tensor has hooks. Without the two attributes it finds none, and
  hooks that were registered before `parallelize` stay behind on the plain parameter.
- `no_torch_function`: a context in which torch function modes see nothing, for checks that are no
  part of what a mode records. Without it they are seen, and `capture` refuses what it sees of them.
- `in_backward`: whether a backward runs. Without it a recomputation counts as a forward: what it
  gathers is given back early, and gathered again.
- `after_backward`: called when the backward ends; torch drops what it was given where the backward
  raised. Without it what is still gathered then is given
  back at the next forward.
- `has_backward_hooks`: whether a module has backward hooks. Without the attributes none are found,
  and those of a stage's first block are called without the gradient of what it received.
- `has_step_hooks`: whether an optimizer has hooks before its step. Without the attribute it is
  taken to have some, and Muon orthogonalises each matrix on every rank.
- `saved_tensors_hooks_now`: hooks that others have set on tensors that autograd saves. Without it
  ours would hide them, so activation checkpointing around a unit saves no memory.
- `compiler_callback`: what torch.compile has asked Python to call for each new frame. Without it a
  compiler is seen only where it traces.
- `innermost_mode`: the torch function mode that sees functions first. Without it the
  modes of stages see every function of their blocks, which takes time.
- `plain_functions`: a context in which functions take instances of subclasses as plain tensors, as
  torch's notes on extending it show. `wrapper_of`: a tensor of a subclass that has no storage.
  `schema_of`: arguments and results of an operator, and which of them are written to. Without one
  of these (`missing_for_deferred`) `deferred()` raises an error that names it.
- `alias_below_autograd`: a tensor of the same memory that knows when that is written to, made in a
  dispatch mode, where `detach` gives one that does not. Without it it is a copy.
- `FakeTensor`, `FakeTensorMode`: tensors without values, by which memory plans see what a graph
  makes. Documented as torch.compiler's fake tensors, imported from where torch itself has them.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "after_backward",
    "alias_below_autograd",
    "any_hooks",
    "compiler_callback",
    "has_backward_hooks",
    "has_step_hooks",
    "hooks_of",
    "in_backward",
    "innermost_mode",
    "missing_for_deferred",
    "no_torch_function",
    "plain_functions",
    "saved_tensors_hooks_now",
    "schema_of",
    "wrapper_of",
]

no_torch_function: Any = getattr(torch._C, "DisableTorchFunction", nullcontext)


def hooks_of(tensor: Tensor) -> list[str]:
    """Return the methods by which hooks of a leaf were registered; empty where it has none."""
    found = []
    if getattr(tensor, "_backward_hooks", None):
        found.append("register_hook")
    if getattr(tensor, "_post_accumulate_grad_hooks", None):
        found.append("register_post_accumulate_grad_hook")
    return found


def any_hooks(tensors: Iterable[Tensor]) -> bool:
    """Return whether one of these leaves has hooks: `hooks_of` at the cost of one call."""
    # A list and not a generator, which would be entered anew for each of thousands of leaves.
    return any(
        [
            getattr(one, "_backward_hooks", None)
            or getattr(one, "_post_accumulate_grad_hooks", None)
            for one in tensors
        ]
    )


_task: Any = getattr(torch._C, "_current_graph_task_id", None)


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether backward hooks are registered on a module, or on all modules.

    Without the attributes none are found.
    """
    of_all = getattr(nn.modules.module, "_global_backward_hooks", None)
    return bool(getattr(module, "_backward_hooks", None) or of_all)


def in_backward() -> bool:
    """Return whether this thread runs a backward."""
    # -1 is what torch answers outside of all backwards.
    return _task is not None and _task() != -1


def after_backward(call: Callable[[], None]) -> None:
    """Call a function when the backward that runs now has ended without an error."""
    engine = torch.autograd.Variable._execution_engine
    queue = getattr(engine, "queue_callback", None)
    if queue is not None:
        queue(call)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks run before this optimizer's step, beside those of all optimizers."""
    # Without the attribute nobody knows, and True is the answer that is slower and never wrong.
    return bool(getattr(optimizer, "_optimizer_step_pre_hooks", True))


def saved_tensors_hooks_now() -> tuple[Any, Any] | None:
    """Return the innermost pair of hooks on tensors that autograd saves; None if none is set."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(True)


_excluded: Any = getattr(torch._C, "_SetExcludeDispatchKeyGuard", None)


def alias_below_autograd(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory and version, for use in `__torch_dispatch__`.

    Modes run below the key that has views share a version, so that it is let in again.
    """
    if _excluded is None:
        return tensor.clone()
    with _excluded(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


plain_functions: Any = getattr(torch._C, "DisableTorchFunctionSubclass", nullcontext)


def _no_mode() -> None:
    return None


compiler_callback: Callable[[], Any] = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None),
    "get_eval_frame_callback",
    _no_mode,
)
"""Return what torch.compile has asked Python to call for each new frame; None outside of it."""
innermost_mode: Any = getattr(torch.overrides, "_get_current_function_mode", _no_mode)
"""Return the torch function mode that was entered last, or None."""


_make_wrapper: Any = getattr(Tensor, "_make_wrapper_subclass", None)


def missing_for_deferred() -> list[str]:
    """Return what tensors without storage need of torch and this torch lacks."""
    found = {
        "torch._C.DisableTorchFunctionSubclass": plain_functions is not nullcontext,
        "torch.Tensor._make_wrapper_subclass": _make_wrapper is not None,
        "OpOverload._schema": hasattr(torch.ops.aten.fill_.Scalar, "_schema"),
    }
    return [name for name, is_there in found.items() if not is_there]


def wrapper_of(kind: type[Tensor], meta: Tensor, device: torch.device) -> Any:
    """Return a tensor of a subclass without storage: shape, strides and dtype of `meta`."""
    return _make_wrapper(
        kind,
        meta.shape,
        strides=meta.stride(),
        storage_offset=meta.storage_offset(),
        dtype=meta.dtype,
        device=device,
    )


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator: `name`, `arguments`, `returns`."""
    return operator._schema
