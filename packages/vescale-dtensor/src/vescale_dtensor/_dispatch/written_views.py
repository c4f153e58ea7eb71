"""Writes to a view that had to be a copy, where the function is known that puts values back.

`x.diagonal().fill_(1)` of a sharded `x`: the diagonal is gathered, so it is a copy. The op runs on
a clone of it, the values go into `x`, and then into the copy, as if both shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vescale_comm.nested import tensors_within

from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._dispatch.execute import after_mutation
from vescale_dtensor._planning.plan import Rule
from vescale_dtensor._tensor.copied_views import is_only_copy
from vescale_dtensor._tensor.dtensor import DTensor

Scatter = Callable[[DTensor], Any]


def give_way_back(view: Any, base: Any, scatter: Scatter) -> None:
    """Let a copied view be written to: `scatter(values)` is the base with these values in it."""
    copied = isinstance(view, DTensor) and view._view_copy_of is not None
    if copied and isinstance(base, DTensor) and base._view_copy_of is None:
        view._way_back = base, scatter


def write_through(
    rule: Rule, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> DTensor | None:
    """Run an in-place op on a copied view and on its base; None where that cannot be done.

    Not done where autograd records it, and where another copy of the base lives, which would not
    change.
    """
    operands = tensors_within((args, kwargs))
    target = operands[rule.writes] if rule.writes is not None else None
    if not isinstance(target, DTensor) or target._way_back is None or target is not args[0]:
        return None
    base, scatter = target._way_back
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (base, *operands))
    if recorded or not is_only_copy(target, base):
        return None
    written = target.clone()
    func(written, *args[1:], **kwargs)
    with torch.no_grad():
        found = redistributed(scatter(written), base._spec.layout)
        base._local_tensor.copy_(found._local_tensor)
        target._local_tensor.copy_(redistributed(written, target._spec.layout)._local_tensor)
    after_mutation(base)
    target_after: DTensor = after_mutation(target)
    return target_after
