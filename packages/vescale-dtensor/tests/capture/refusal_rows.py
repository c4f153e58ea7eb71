"""What capture refuses: for each row of the guide's table the functions that show it."""

from functools import partial

import numpy
import torch
import torch.distributed as dist
import vescale_dtensor as vd
import vescale_dtensor._capture
from capture_guards import spread
from function_cases import Gathered, Listed, Returned, one_after_the_other
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
    optimizer = torch.optim.LBFGS([weight])

    def step(x):
        def closure():
            loss = (x * weight).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

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


def tagged(x):
    y = x * 2
    y.tag = 3
    return y


# In the order of the guide: the words of the error, and functions that are refused with them.
ROWS = [
    ("reads the value of a tensor", lambda x: x.sum().item(), lambda x: x if x.sum() > 3 else -x),
    ("the text of a tensor has its values", lambda x: x * len(str(x.to_local()))),
    ("reads the value of a tensor", Built(stepping)),
    ("replays would keep the first", hooked),
    ("registered and removed inside", unhooked),
    ("depends on values", lambda x: x[x > 0], lambda x: x.unique()),
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
        lambda x: Returned.apply(x) * 2,
        lambda x: Gathered.apply(x) * 2,
        lambda x: Listed.apply([x]) * 2,
        lambda x: one_after_the_other(x * torch.ones(4, requires_grad=True)),
    ),
    (
        "custom autograd.Function",
        lambda x: with_backward_hook()(x * torch.ones(4, requires_grad=True)) * 2,
    ),
    ("that torch's overrides do not see", lambda x: x + torch.from_numpy(numpy.ones(4, dtype="f"))),
    (
        "is active inside",
        lambda x: x * torch.func.grad(torch.sum)(torch.ones(4)),
        lambda x: x * torch.vmap(torch.neg)(torch.ones(4)),
    ),
    ("that is not strided", lambda x: x * torch.eye(4).to_sparse().to_dense().sum(0)),
    ("raw collectives", lambda x: dist.all_reduce(x.to_local().clone())),
    (
        "a random generator was moved",
        lambda x: torch.nn.functional.dropout(x + torch.manual_seed(3).initial_seed()),
        lambda x: (x * 2, torch.manual_seed(3))[0],
    ),
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
    ),
    (
        "that a replay would not renew",
        lambda x: x * x.to_local()._version,
        lambda x: x * x.to_local().is_shared(),
    ),
    ("before it is initialized", Built(lambda: nn.LazyLinear(4))),
    ("has been replaced", with_another_method),
    ("on which the function sets", tagged),
    ("a replay makes no such tensor", retained),
    ("Pass it as an argument", Built(with_history)),
    ("Write into it: p", Built(storing_a_gathered_parameter)),
    ("read p.grad after", Built(returning_a_gradient)),
    (
        "is returned, of which each call",
        lambda x: {x.dim()},
        lambda x: iter([x]),
        lambda x: [x].__getitem__,
        lambda x: lambda: x.dim(),
        ValueError,
    ),
    ("is returned in two places", lambda x: [[x * 2]] * 2),
]
