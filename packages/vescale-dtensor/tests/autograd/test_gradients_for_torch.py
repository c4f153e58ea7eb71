"""torch's DTensor of a gradient shows the gradient, whatever is added or reduced afterwards.

It shares memory with `.grad`, as on one device, and cannot change its layout with it.
"""

import pytest
import torch
from vescale_comm import simulate
from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

X = torch.arange(8.0).reshape(4, 2)
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def backward(w, x):
    (x @ w).sum().backward()


def for_torch(gradient):
    return gradient.to_torch() if isinstance(gradient, DTensor) else gradient


@case
def reduced_afterwards(w, x):
    backward(w, x)
    theirs = for_torch(w.grad)
    return w.grad * w.grad, theirs


@case
def added_to_afterwards(w, x):
    backward(w, x)
    theirs = for_torch(w.grad)
    backward(w, x)
    return theirs, w.grad


@case
def of_a_total(w, x):
    backward(w, x)
    square = w.grad * w.grad
    theirs = for_torch(w.grad)
    backward(w, x)
    return theirs, w.grad, square


@case
def of_a_view(w, x):
    backward(w, x)
    theirs = for_torch(w.grad[0])
    backward(w, x)
    return theirs, w.grad * w.grad


@case
def written(w, x):
    backward(w, x)
    for_torch(w.grad).mul_(2)
    backward(w, x)
    return (w.grad,)


@case
def dropped(w, x):
    backward(w, x)
    theirs = for_torch(w.grad)
    w.grad = None
    backward(w, x)
    return theirs, w.grad


@pytest.mark.parametrize("placement", [Replicate(), Shard(1)])
@pytest.mark.parametrize("name", CASES)
def test_as_on_one_device(name, placement):
    expected = [t.detach() for t in CASES[name](torch.ones(2, 3, requires_grad=True), X)]

    def run(rank, world_size):
        mesh = init_device_mesh("cpu", (2,))
        w = distribute_tensor(torch.ones(2, 3), mesh, [placement]).requires_grad_()
        found = CASES[name](w, distribute_tensor(X, mesh, [Shard(0)]))
        torch.testing.assert_close([t.detach().full_tensor() for t in found], expected)

    simulate(2)(run)
