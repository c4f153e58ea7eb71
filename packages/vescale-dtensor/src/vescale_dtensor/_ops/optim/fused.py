"""`torch._fused_*_`: optimizer steps of lists in one kernel, on the lists of local tensors.

They are elementwise: it is enough that a parameter, its gradient and its states share a layout.
What has another one is redistributed for the step, and written back where the kernel writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.redistribute import redistributed, replicated
from vescale_dtensor._autograd.redistribution_setup import one_mesh
from vescale_dtensor._dispatch.execute import after_mutation
from vescale_dtensor._dispatch.plain_operands import replicated_operand
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._fast_path.cache import list_cache
from vescale_dtensor._fast_path.foreach import (
    ListCall,
    after_mutations,
    check_all_writable,
    local_lists,
    reduce_gradients,
)
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._planning import OpCall, Reads
from vescale_dtensor._planning.plan import function_name
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.schemas import signatures

_NAMES = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
Lists = tuple[Sequence[Tensor], ...]


def _fused(func: Callable[..., Any]) -> Callable[..., None]:
    signature = signatures(func)[0]
    names = signature.positional
    stated = [i for i, name in enumerate(names) if name in signature.written]

    def run(*lists: Any, **kwargs: Any) -> None:
        lists = (*lists, *[kwargs.pop(name) for name in names[len(lists) :] if name in kwargs])
        # Gradients are written where they are unscaled, and only there.
        unscales = kwargs.get("grad_scale") is not None
        written = [i for i in stated if i < len(lists) and (unscales or names[i] != "grads")]
        targets = [lists[i] for i in written]
        for target in targets:
            check_all_writable(target, func)
        same = all(len(one) == len(lists[0]) for one in lists if one)
        if same and not torch.is_grad_enabled():
            # Before the key is made, which has the layouts: each step comes with partial sums, and
            # what is stored is the call on their totals.
            reduce_gradients(lists[1:2])
        call = ListCall(func, lists, kwargs)
        # The key has the layouts of all lists, and hyperparameters by type alone: a new learning
        # rate finds the stored call.
        if call.key in list_cache and not torch.is_grad_enabled():
            func(*call.args, **call.kwargs)
            for target in targets:
                if target and type(target[0]) is DTensor:
                    after_mutations(target)
            return
        # Stored without a value: the key says that local tensors can be passed as they are.
        if call.key is not None and _moves_nothing(lists, kwargs):
            list_cache.store(call.key, None)
        _step(func, lists, kwargs, written)

    return run


def _moves_nothing(lists: Lists, kwargs: dict[str, Any]) -> bool:
    """Whether each parameter, its gradient and states are DTensors of one layout, not partial."""
    if any(isinstance(value, DTensor) for value in kwargs.values()):
        return False  # a loss scale, say, which may be partial
    for parameter, *others in zip(*[v for v in lists if v], strict=False):
        if not isinstance(parameter, DTensor) or parameter._spec.layout.partial:
            return False
        for other in others:
            if isinstance(other, DTensor):
                layout, wanted = other._spec.layout, parameter._spec.layout
                if layout.placements != wanted.placements or not one_mesh(layout, wanted):
                    return False
            # A count of steps. A plain state is that of the global parameter.
            elif type(other) is not Tensor or other.ndim:
                return False
    return True


def _step(
    func: Callable[..., Any], lists: Lists, kwargs: dict[str, Any], written: list[int]
) -> None:
    """Run the step on tensors in the layouts of their parameters. Collective."""
    if any(tensors and len(tensors) != len(lists[0]) for tensors in lists):
        func(*map(local_lists, lists), **kwargs)  # torch compares the lengths first, and raises
        raise RuntimeError(f"{function_name(func)}: lists of different lengths")
    # A loss scale or a flag applies to every element: each rank needs the global value.
    named = {
        name: replicated(value)._local_tensor if isinstance(value, DTensor) else value
        for name, value in kwargs.items()
    }
    layouts = [_layout(p, func) for p in lists[0]]
    shapes = [p.shape for p in lists[0]]
    call = OpCall(func, lists, {}, Reads.NOTHING)
    # Reducing a gradient changes its layout in place, so all are redistributed before any is used.
    used = [
        [_in_layout(*item, call) for item in zip(tensors, layouts, shapes, strict=bool(tensors))]
        for tensors in lists
    ]
    func(*map(local_lists, used), **named)
    # In the order of the lists, which all ranks share: so the collectives in here match.
    for position in written:
        for original, copy in zip(lists[position], used[position], strict=True):
            _write_back(original, copy, func)


def _layout(parameter: Tensor, func: Callable[..., Any]) -> Layout | None:
    if not isinstance(parameter, DTensor):
        return None
    layout: Layout = parameter._spec.layout
    # An update is not linear in the parameter: partial sums cannot be updated each by itself.
    if layout.partial:
        raise UnsupportedError(
            f"{function_name(func)}: a parameter is laid out as {layout}; its terms cannot be "
            "updated one by one. Redistribute it to Replicate() or Shard(), or use fused=False."
        )
    return layout


def _in_layout(item: Tensor, layout: Layout | None, shape: Any, call: OpCall) -> Tensor:
    """A gradient or state in its parameter's layout; replicated for a plain parameter."""
    if layout is None or item.shape != shape:  # a count of steps has no dims
        return replicated(item) if isinstance(item, DTensor) else item
    if not isinstance(item, DTensor):
        if layout.replicated == layout.active:
            return item  # its own memory, which the kernel may write
        item = replicated_operand(item, layout.mesh, call)
    return redistributed(item, layout)


def _write_back(original: Tensor, copy: Tensor, func: Callable[..., Any]) -> None:
    """Copy what the kernel has written to the tensor that the caller passed. Collective."""
    if copy is not original:
        if isinstance(copy, DTensor) and not isinstance(original, DTensor):
            copy = replicated(copy)._local_tensor
        with torch.no_grad():
            original.copy_(copy)
    after_mutation(original)


HANDLERS: dict[Any, Callable[..., Any]] = {
    getattr(torch, name): _fused(getattr(torch, name)) for name in _NAMES if hasattr(torch, name)
}
