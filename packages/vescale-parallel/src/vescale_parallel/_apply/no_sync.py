"""`no_sync(model)`: backwards of several microbatches whose gradients are reduced once."""

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from vescale_parallel._zero.schedule import zero_schedule_of


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Keep the gradients of backwards inside of it on their rank, as DDP's `no_sync` does.

    The first backward afterwards reduces them together with its own, in one reduce-scatter a unit:
    run the last microbatch outside. Until then `.grad` is a DTensor that is partial over the axis
    of `zero`: `zero_grad` drops it, in-place writes reach it, and the step of an optimizer reduces
    it first where no backward has. Parameters that the plan does not shard by `zero` need no
    such word: their gradients are summed once, when they are first needed.

    Args:
        model: what `parallelize` returned.

    Examples:
        with no_sync(model):
            for part in parts[:-1]:
                loss(model(part)).backward()
        loss(model(parts[-1])).backward()
    """
    schedule = zero_schedule_of(model)
    return schedule.no_sync() if schedule is not None else nullcontext()
