"""Methods other than `forward`, called with what surrounds `forward`."""

from __future__ import annotations

from typing import Any

from torch import nn

from vescale_parallel._common.interrupts import Interruptible


def through_forward(model: nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a model as its forward is called: `through_forward(model, "loss_of", x, y)`.

    The method gets its arguments as the plan's batch says, sharded, and units of `zero` are
    gathered as for `model(...)`; called directly, it gets the whole batch, and every rank computes
    all of it. The method may call the model itself.

    Args:
        model: what `parallelize` returned.
        method: the name of the method.
        args: its arguments by position: of the global batch, or of this rank's rows.
        kwargs: its arguments by name.

    Returns:
        What the method returns.

    Raises:
        AttributeError: the model has no such method.
    """
    call, forward = getattr(model, method), vars(model).get("forward")

    def restore() -> None:
        if forward is None:
            vars(model).pop("forward", None)
        else:
            vars(model)["forward"] = forward

    def instead(*given: Any, **named: Any) -> Any:
        restore()  # at once: the method may call the model
        return call(*given, **named)

    # On the instance, where `nn.Module.__call__` looks first: hooks then run around the method as
    # they do around the model's own forward.
    ends = forward.ends if isinstance(forward, Interruptible) else ()
    vars(model)["forward"] = Interruptible(model, instead, ends)
    try:
        return model(*args, **kwargs)
    finally:
        restore()
