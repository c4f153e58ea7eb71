"""What capture refuses: for each row of the guide's table the functions that show it."""

from functools import partial

import numpy
import torch
import torch.distributed as dist
import vescale_dtensor as vd
import vescale_dtensor._capture
from capture_guards import spread
from function_cases import Gathered, Returned, Scaled
from state_keepers import KEEPERS, keep_buffer, keep_global, keep_nonlocal, keeping
from torch import nn
from torch.utils.checkpoint import checkpoint
from vescale_dtensor import storage


def with_backward_hook():
    model = nn.Identity()
    model.register_full_backward_hook(lambda module, inward, outward: None)
    return model


COUNTED = torch.zeros(1)


def _counted(x):
    COUNTED.add_(1)
    return x.sin() + COUNTED


class Built:
    """A function that is made where it runs: it needs a mesh."""

    def __init__(self, make):
        self.make = make


def given(x, more):
    return x


def stepping():
    weight = nn.Parameter(spread(torch.ones(4)))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x):
        (x * weight).square().sum().backward()
        optimizer.step()

    return step


def with_another_method(x):
    original = torch.Tensor.relu
    torch.Tensor.relu = lambda self: original(self) * 2
    try:
        return x.relu()
    finally:
        del torch.Tensor.relu


def hooked(x):
    hidden, total = x * torch.ones(4, requires_grad=True), x.sum()
    hidden.register_hook(lambda gradient: gradient * total)
    return hidden


def unhooked(x):
    hidden = x * torch.ones(4, requires_grad=True)
    hidden.register_hook(lambda gradient: gradient * 2).remove()
    return hidden


def retained(x):
    hidden = x * torch.ones(4, requires_grad=True)
    hidden.retain_grad()


def with_history():
    hidden = spread(torch.ones(4)).requires_grad_() * 2
    return lambda x: x * hidden


def storing_a_gathered_parameter():
    stored = spread(torch.ones(4)).requires_grad_()

    def function(x):
        leaf = storage.local_leaf(stored)
        given = storage.gathered(stored, leaf.clone(), stored.device_mesh, stored.placements)
        storage.Gathering.watch_data([given], [])
        with torch.no_grad():
            given.data = given.detach() * 2
        return x * given

    return function


def returning_a_gradient():
    weight = spread(torch.ones(4)).requires_grad_()

    def function(x):
        (x * weight).sum().backward()
        return weight.grad

    return function


def inference(x):
    with torch.inference_mode():
        return x + 1


def leaving(change, new, old):
    """A function that leaves a setting changed, which the next call finds as it was."""

    def function(x):
        change(old)
        y = x * 2
        change(new)
        return y

    return function


# In the order of the guide: the words of the error, and functions that are refused with them.
ROWS = [
    (
        "reads the value of a tensor",
        lambda x: x.sum().item(),
        lambda x: x if x.sum() > 3 else -x,
        lambda x: x[x > 0],
        lambda x: x.unique(),
    ),
    ("the step of an optimizer", Built(stepping)),
    ("replays would keep the first", hooked, unhooked),
    (
        "in call after call",
        *map(keeping, KEEPERS),
        Built(keep_nonlocal),
        Built(keep_buffer),
        keep_global,
    ),
    ("an argument is a", partial(given, more=numpy.ones(3)), partial(given, more=iter([1]))),
    (
        "custom autograd.Function",
        lambda x: Scaled.apply(x * torch.ones(4, requires_grad=True)) * 2,
        lambda x: Returned.apply(x * torch.ones(4, requires_grad=True)) * 2,
        lambda x: Gathered.apply(x * torch.ones(4, requires_grad=True)) * 2,
        lambda x: with_backward_hook()(x * torch.ones(4, requires_grad=True)) * 2,
    ),
    (
        "pass the tensor as an argument",
        lambda x: x + torch.from_numpy(numpy.ones(4, dtype="f")),
        Built(with_history),
    ),
    (
        "and pass what it gives",
        lambda x: x * torch.func.grad(torch.sum)(torch.ones(4)),
        lambda x: x * torch.vmap(torch.neg)(torch.ones(4)),
        lambda x: x * torch.eye(4).to_sparse().to_dense().sum(0),
    ),
    ("raw collectives", lambda x: dist.all_reduce(x.to_local().clone())),
    (
        "saved-tensor hooks",
        lambda x: checkpoint(torch.sin, x * torch.ones(4, requires_grad=True), use_reentrant=False),
    ),
    (
        "that backward computes again",
        lambda x: vd.checkpoint(_counted, x * torch.ones(4, requires_grad=True)),
    ),
    (
        "Change it outside",
        inference,
        leaving(torch.set_grad_enabled, False, True),
        leaving(torch.set_default_dtype, torch.float64, torch.float32),
        leaving(torch.use_deterministic_algorithms, True, False),
        leaving(torch.set_num_threads, 2, 1),
        lambda x: torch.nn.functional.dropout(x + torch.manual_seed(3).initial_seed()),
    ),
    (
        "that a replay would not renew",
        lambda x: x * x.to_local()._version,
        lambda x: x * x.to_local().is_shared(),
        retained,
    ),
    ("before it is initialized", Built(lambda: nn.LazyLinear(4))),
    ("has been replaced", with_another_method),
    ("Write into it: p", Built(storing_a_gathered_parameter)),
    (
        "is returned, of which each call",
        lambda x: {x.dim()},
        lambda x: iter([x]),
        lambda x: [x].__getitem__,
        lambda x: lambda: x.dim(),
        ValueError,
        Built(returning_a_gradient),
    ),
]
