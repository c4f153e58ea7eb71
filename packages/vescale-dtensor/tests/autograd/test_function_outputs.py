"""Outputs of custom autograd.Functions have the Function's backward, and are no leaves.

Whatever grad mode their forward sets, and whatever is asked of them before they are first used.
"""

import copy

import pytest
import torch
from one_device import check
from vescale_comm import simulate


def on_ranks(program):
    simulate(4).run(lambda rank, world: check(program))


X = torch.linspace(-1, 1, 24).reshape(6, 4)


class OfOwnMode(torch.autograd.Function):
    """Its backward is not that of its forward, which enables grad: both cannot be taken."""

    @staticmethod
    def forward(ctx, x, how):
        with torch.enable_grad():
            return FORWARDS[how](x)

    backward = staticmethod(lambda ctx, grad: (torch.full_like(grad, 5.0) * grad, None))


def _used_inside(x):
    doubled = x * 2
    (doubled * doubled).sum()  # joins what it uses; the output may get its node after that
    return doubled


def _of_no_input(x):
    return torch.ones_like(x.detach()) * 3


def _written(x):
    return (x * 2).add_(1)


FORWARDS = {
    "number": lambda x: x * 2,
    "two": lambda x: x + x,
    "three": lambda x: torch.addcmul(x, x, x),
    "values": lambda x: x.view(4, 6).view(6, 4),
    "function": lambda x: torch.nn.functional.gelu(x),
    "foreach": lambda x: torch._foreach_mul([x, x], 2)[0],
    "list": lambda x: torch.cat([x, x])[:6],
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
    "used inside": _used_inside,
    "of no input": _of_no_input,
    "written": _written,
}


@pytest.mark.parametrize("name", FORWARDS)
def test_forward_that_enables_grad(name):
    def program(place):
        read = []
        for _ in range(2):  # the second time, calls may be compiled
            x = place(X, grad=True)
            FORWARDS[name](x)  # so that calls are compiled outside of a Function first
            y = OfOwnMode.apply(x, name)
            outside = FORWARDS[name](x * 1)
            (y * y.detach()).sum().backward()
            read += [y, x.grad, y.requires_grad, y.grad_fn.name(), outside]
        return read

    on_ranks(program)


class Plain(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 2)
    backward = staticmethod(lambda ctx, grad: grad * 5)


def _outcome(change, y):
    """What a change returns, or the type of what it raises."""
    try:
        return change(y)
    except RuntimeError as error:
        return type(error).__name__


def _retain(y):
    y.retain_grad()
    (y * y).sum().backward()
    return y.grad


def _set_gradient(y):
    y.grad = torch.ones_like(y)
    (y * 2).sum()
    return y.grad


def _without_grad(y):
    with torch.no_grad():
        return _outcome(lambda t: t.requires_grad_(False).requires_grad, y)


CHANGES = {
    "detach_": lambda y: (y.detach_().requires_grad, y.grad_fn, y.is_leaf, y * 2),
    "detach_ and wanted again": lambda y: (y.detach_().requires_grad_().is_leaf, _retain(y)),
    "detach": lambda y: (y.detach().requires_grad, y.detach().grad_fn, y.is_leaf),
    "requires_grad_": lambda y: (y.requires_grad_().is_leaf, y.grad_fn.name()),
    "requires_grad_(False)": lambda y: y.requires_grad_(False).requires_grad,
    "requires_grad = False": lambda y: setattr(y, "requires_grad", False),
    "requires_grad_(False) without grad": _without_grad,
    "retain_grad": _retain,
    "grad": _set_gradient,
    "deepcopy": lambda y: copy.deepcopy(y).requires_grad,
}


@pytest.mark.parametrize("used", [False, True], ids=("unused", "used"))
@pytest.mark.parametrize("name", CHANGES)
def test_change_of_an_output(name, used):
    def program(place):
        x = place(X, grad=True)
        y = Plain.apply(x)
        if used:
            y * 1
        found = _outcome(CHANGES[name], y)
        state = y.requires_grad, y.is_leaf, y.grad_fn is None
        if y.requires_grad and not y.is_leaf:
            y.sum().backward()
        return found, state, x.grad

    on_ranks(program)


def test_data_of_an_output():
    def program(place):
        x = place(X, grad=True)
        y = Plain.apply(x)
        y.data = torch.ones_like(y)
        (y * y).sum().backward()
        return y, x.grad

    on_ranks(program)
