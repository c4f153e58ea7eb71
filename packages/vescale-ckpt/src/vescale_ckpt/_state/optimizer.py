"""Give an optimizer the state that it will have, so that there is something to load into."""

import torch


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of an optimizer that has not stepped yet; its parameters keep their values.

    An optimizer creates its state, such as Adam's moments, in its first step, with the layouts of
    its parameters. This does that step with zero gradients and a learning rate of zero, so that it
    can be passed to `load` and be filled. An optimizer that has state already is left alone.

    The state's numbers are placeholders: load a checkpoint into them before training continues.
    Schedulers keep first rates in the optimizer's groups ("initial_lr"): where `lr` is a tensor
    these are tensors too, so make the scheduler before the state that is passed to `load`.

    Examples:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.AdamW([weight])
        >>> init_optimizer_state(optimizer)
        >>> sorted(optimizer.state_dict()["state"][0])
        ['exp_avg', 'exp_avg_sq', 'step']
    """
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for parameter in parameters:
            # A frozen parameter gets no state: the optimizer skips what has no gradient.
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for group in optimizer.param_groups:
            if "lr" in group:
                is_tensor = isinstance(group["lr"], torch.Tensor)
                group["lr"] = torch.zeros_like(group["lr"]) if is_tensor else 0.0
        # With zero gradients and rates: the step makes the state, and changes no parameter.
        optimizer.step()
    finally:
        # Whatever happened, also in `step`: gradients and rates are the user's.
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
