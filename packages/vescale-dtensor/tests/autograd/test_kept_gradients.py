"""A gradient that was kept stays right when `.grad` becomes another tensor, and is counted once.

Whatever a program kept of a leaf's gradient (the gradient, a view of it, the tensor that it was set
to, torch's DTensor of it) has the values of one device after later backwards, reads and writes.
"""

from itertools import product

import pytest
import torch
import vescale_dtensor as vd
from gradient_programs import MESHES, check_seeds
from named_cases import named_cases
from on_mesh import on_mesh
from vescale_comm import simulate
from vescale_dtensor import Replicate, Shard, UnsupportedError

X = torch.arange(8.0).reshape(4, 2)
CASES, case = named_cases()
PLACEMENTS = [(Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(1), Shard(0))]


def backward(w, x):
    (x @ w).sum().backward()


@case
def a_view_of_a_dropped_gradient(w, x):
    backward(w, x)
    view = w.grad[0]
    w.grad = None
    backward(w, x)
    return w.grad * w.grad, view


@case
def a_gradient_that_was_replaced(w, x):
    backward(w, x)
    former = w.grad
    read = former * former
    w.grad = former.clone()
    backward(w, x)
    return read, former * 2, former, w.grad


@case
def an_unread_gradient_that_was_replaced(w, x):
    backward(w, x)
    former, view = w.grad, w.grad[:, 1]
    w.grad = torch.ones_like(w)
    backward(w, x)
    return former * former, view * view, w.grad * w.grad, former


@case
def the_tensor_that_was_assigned(w, x):
    mine = torch.ones_like(w) * 3
    part = mine[0]
    w.grad = mine
    backward(w, x)
    mine.mul_(2)
    backward(w, x)
    return mine, part, w.grad


@case
def a_clone_that_was_assigned(w, x):
    backward(w, x)
    mine = w.grad.clone()
    w.grad = mine
    backward(w, x)
    return mine, w.grad * w.grad


@case
def one_gradient_of_two_leaves(w, x):
    other = w.detach().clone().requires_grad_()
    backward(w, x)
    other.grad = w.grad
    backward(w, x)
    backward(other, x)
    return w.grad, other.grad * other.grad


@case
def a_transposed_view_assigned(w, x):
    backward(w, x)
    w.grad = w.grad.t()
    backward(w, x)
    return w.grad, w.grad * w.grad


@case
def the_gradient_assigned_to_itself(w, x):
    backward(w, x)
    former = w.grad
    w.grad = former.detach()
    backward(w, x)
    return former * former, w.grad


@case
def a_recorded_gradient_replaced_by_torch(w, x):
    (x @ w).square().sum().backward(create_graph=True)
    former = w.grad.detach()
    view = w.grad[0].detach()
    (x @ w).square().sum().backward(create_graph=True)
    return w.grad.detach() * w.grad.detach(), former, view, former * former


@case
def data_of_the_gradient(w, x):
    backward(w, x)
    former, view, data = w.grad, w.grad[0], torch.ones_like(w)
    w.grad.data = data
    backward(w, x)
    return former, view, data, w.grad * w.grad


@case
def data_of_the_leaf_in_another_dtype(w, x):
    backward(w, x)
    read = w.grad * w.grad
    w.data = w.data.double()
    w.grad.data = w.grad.data.double()
    backward(w, x.double())
    return read.double(), w.grad


@case
def set_of_the_leaf(w, x):
    backward(w, x)
    with torch.no_grad():
        w.set_(torch.ones_like(w))
    backward(w, x)
    return w, w.grad


@case
def a_hook_that_reads_the_gradient(w, x):
    seen = []
    backward(w, x)
    w.register_hook(lambda g: seen.append(w.grad * w.grad))
    backward(w, x)
    return w.grad, *seen


@case
def a_frozen_leaf_whose_gradient_is_set(w, x):
    w.requires_grad_(False)
    w.grad = torch.ones_like(w)
    w.requires_grad_()
    backward(w, x)
    backward(w, x)
    return (w.grad,)


@case
def a_total_read_in_inference_mode(w, x):
    backward(w, x)
    with torch.inference_mode():
        (w.grad * w.grad).sum().item()
    backward(w, x)
    return (w.grad,)


def for_torch(gradient):
    return gradient.to_torch() if isinstance(gradient, vd.DTensor) else gradient


@case
def for_torch_reduced_afterwards(w, x):
    backward(w, x)
    return w.grad * w.grad, for_torch(w.grad)


@case
def for_torch_added_to_afterwards(w, x):
    backward(w, x)
    theirs = for_torch(w.grad)
    backward(w, x)
    return theirs, w.grad


@case
def for_torch_of_a_total(w, x):
    backward(w, x)
    square = w.grad * w.grad
    theirs = for_torch(w.grad)
    backward(w, x)
    return theirs, w.grad, square


@case
def for_torch_of_a_view(w, x):
    backward(w, x)
    theirs = for_torch(w.grad[0])
    backward(w, x)
    return theirs, w.grad * w.grad


@case
def for_torch_written(w, x):
    backward(w, x)
    for_torch(w.grad).mul_(2)
    backward(w, x)
    return (w.grad,)


@case
def for_torch_dropped(w, x):
    backward(w, x)
    theirs = for_torch(w.grad)
    w.grad = None
    backward(w, x)
    return theirs, w.grad


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def on_ranks(rank, world, name, placements):
    mesh = vd.init_device_mesh("cpu", (world,))
    w = vd.distribute_tensor(torch.ones(2, 2), mesh, [placements[0]]).requires_grad_()
    x = vd.distribute_tensor(X, mesh, [placements[1]])
    return [whole(tensor) for tensor in CASES[name](w, x)]


# A row of what is sharded by rows lies as no placement of torch says.
LAID = [
    (name, placements)
    for name, placements in product(CASES, PLACEMENTS)
    if name != "for_torch_of_a_view" or placements[0] != Shard(0)
]


@pytest.mark.filterwarnings("ignore:Using backward", "ignore:grad and param do not obey")
@pytest.mark.parametrize(("name", "placements"), LAID, ids=str)
def test_kept_gradients(name, placements):
    expected = [whole(t) for t in CASES[name](torch.ones(2, 2).requires_grad_(), X)]
    for found in simulate(2).run(on_ranks, name, placements):
        torch.testing.assert_close(found, expected)


def refusals(rank, world):
    mesh = vd.init_device_mesh("cpu", (world,))
    w = vd.distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]).requires_grad_()
    backward(w, vd.distribute_tensor(X, mesh, [Shard(0)]))
    other = vd.distribute_tensor(torch.ones(3, 2), mesh, [Replicate()])
    for change in (w.grad.t_, w.grad.unsqueeze_):
        with pytest.raises(UnsupportedError, match="the gradient of a leaf"):
            change(*(() if change.__name__ == "t_" else (0,)))
    with pytest.raises(UnsupportedError, match="the gradient of a leaf"):
        w.grad.data = other
    with pytest.raises(UnsupportedError, match="a gradient of its former shape"):
        w.data = other
    with torch.no_grad(), pytest.raises(UnsupportedError, match="a gradient of its former shape"):
        w.t_()
    return whole(w.grad).tolist()


def test_a_gradient_keeps_the_shape_of_its_leaf_or_it_is_an_error():
    assert simulate(2).run(refusals) == [[[12.0, 12.0], [16.0, 16.0]]] * 2


def a_copied_view(mesh):
    w = vd.distribute_tensor(torch.ones(3, 2), mesh, [Shard(0), Shard(0)]).requires_grad_()
    w.sum().backward()
    flat = w.grad.view(-1)
    with pytest.raises(UnsupportedError, match="forced a copy"):
        w.sum().backward()
    seen = whole(flat).tolist()
    del flat
    w.sum().backward()
    return seen, whole(w.grad).tolist()


def test_nothing_is_added_to_a_gradient_while_a_copied_view_of_it_lives():
    assert on_mesh((2, 2), a_copied_view) == [([1.0] * 6, [[2.0, 2.0]] * 3)] * 4


def an_expanded_gradient(rank, world):
    mesh = vd.init_device_mesh("cpu", (world,))
    w = vd.distribute_tensor(torch.ones(3, 1), mesh, [Shard(0)]).requires_grad_()
    (found,) = torch.autograd.grad(w.sum(), w)
    found.mul_(2)
    w.grad = vd.ones(1, device_mesh=mesh).expand(3, 1).redistribute(placements=[Shard(0)])
    w.sum().backward()
    return whole(w.grad * found).tolist()


def test_an_expanded_gradient_is_added_to_on_all_ranks_or_on_none():
    """torch would refuse where a shard has two elements, and not where it has one."""
    assert simulate(2).run(an_expanded_gradient) == [[[4.0]] * 3] * 2


@pytest.mark.filterwarnings("ignore:Using backward", "ignore:grad and param do not obey")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_random_programs_read_what_one_device_reads(sizes):
    """On meshes of one to four axes; a failure names its seed."""
    ranks = torch.Size(sizes).numel()
    for found, _ in simulate(ranks).run(check_seeds, sizes, range(64 // ranks)):
        assert not found
