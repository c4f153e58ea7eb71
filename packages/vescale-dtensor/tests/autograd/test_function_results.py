"""Plain tensors that custom autograd.Functions return for DTensors are whole, and differentiable.

Losses in chunks and kernels write into plain buffers. Values and gradients are those of one device,
in every layout; what was made of one rank's part alone is an error in backward. Every program here
runs on one device and on dp=2 x tp=2.
"""

import logging
import sys

import plain_result_functions as of
import pytest
import torch
import vescale_dtensor as vd
from named_cases import named_cases
from one_device import Place, check
from torch.utils.checkpoint import checkpoint
from vescale_comm import SimulationError, simulate
from vescale_comm.testing import device_mesh, on_ranks, run
from vescale_dtensor import InterleavedShard, Partial, RaggedShard, Replicate, Shard
from vescale_dtensor._autograd import function_results
from vescale_dtensor._torch.compat import apply_code

X = torch.linspace(-1, 1, 20).reshape(5, 4)
W = torch.linspace(-1, 2, 12).reshape(3, 4)


def beside(x, w, view, leaf):
    plain = torch.arange(4.0, requires_grad=True)
    kept, total = of.Beside.apply(x, plain if leaf else plain * 2, view)
    loss = (kept * total).sum()
    (found,) = torch.autograd.grad(loss, plain, retain_graph=True)
    return loss + found.sum()


PROGRAMS = {
    "rows": lambda x, w: of.Chunked.apply(x, w)[0].square().sum(),
    "mean": lambda x, w: of.Chunked.apply(x, w)[1] * 3,
    "rows and mean": lambda x, w: sum(r.sin().sum() for r in of.Chunked.apply(x, w)),
    "beside other uses": lambda x, w: of.Chunked.apply(x, w)[1] + (x @ w.t()).square().mean(),
    "with DTensors again": lambda x, w: (of.Chunked.apply(x, w)[0] * x.sum(1).sin()).sum(),
    "one operand wants a gradient": lambda x, w: of.Chunked.apply(x.detach(), w)[1],
    "an operand twice": lambda x, w: of.Chunked.apply(w * 2, w)[1],
    "squares": lambda x, w: of.Squares.apply(x).sin(),
    "chained": lambda x, w: of.Squares.apply(of.Saved.apply(x) * w.sum()),
    "after DTensors": lambda x, w: of.Squares.apply(of.Several.apply(x, 2.0)[1]),
    "several": lambda x, w: sum(r.square().sum() for r in of.Several.apply(x, 2.0)[:2]),
    "one of several, plain": lambda x, w: of.Several.apply(x, 2.0)[0].square().sum(),
    "one of several, a DTensor": lambda x, w: of.Several.apply(x, 2.0)[1].square().sum(),
    "saved": lambda x, w: (of.Saved.apply(x) * 2).sum(),
    "a context of its own": lambda x, w: of.WithContext.apply(x).square().sum(),
    "a context of sizes": lambda x, w: (of.WithSizes.apply(x) * 2).square().sum(),
    "once": lambda x, w: of.Once.apply(x) * 2,
    "calls another": lambda x, w: of.Outer.apply(x),
    "a buffer": lambda x, w: of.Buffered.apply(x, torch.zeros(5, 4)).square().sum(),
    "plain beside, a leaf": lambda x, w: beside(x, w, False, True),
    "plain beside": lambda x, w: beside(x, w, False, False),
    "a view of plain beside": lambda x, w: beside(x, w, True, True),
    "lists": lambda x, w: of.OfList.apply(x, [x, w]).sin().sum(),
    "a view": lambda x, w: of.View.apply(x).square().sum(),
    "called by C": lambda x, w: sum(map(of.Squares.apply, [x, w])),
    "a decorated forward": lambda x, w: of.Decorated.apply(x) * 3,
    "arguments bound anew": lambda x, w: of.Rebinding.apply(x, w).square().sum(),
    "item": lambda x, w: of.Numbers.apply(x, lambda x: torch.tensor(x.sum().item())),
    "tolist": lambda x, w: of.Numbers.apply(x, lambda x: torch.tensor(x.tolist()).sum()),
    "numpy": lambda x, w: of.Numbers.apply(x, lambda x: torch.from_numpy(x.detach().numpy()).sum()),
    "data": lambda x, w: of.Numbers.apply(x, lambda x: of.gathered(x.data).sum()),
    "float": lambda x, w: of.Numbers.apply(x, lambda x: torch.ones(()) * float(x.sum())),
    "full": lambda x, w: of.Numbers.apply(x, lambda x: torch.full((), x.sum())),
    "foreach": lambda x, w: of.Numbers.apply(x, lambda x: foreach(x.sum())),
    "an index": lambda x, w: of.Numbers.apply(x, lambda x: indexed(x.sum())),
    "checkpointed": lambda x, w: checkpoint(
        lambda x: of.Chunked.apply(x.sin(), w)[1] * 2, x, use_reentrant=False
    ),
    "checkpointed, beside": lambda x, w: checkpoint(
        lambda x: (of.Chunked.apply(x.sin(), w)[0] * (x @ w.t()).sum(1)).sum(),
        x,
        use_reentrant=False,
    ),
    "autocast": lambda x, w: autocast(x, w),
}
TWICE = ("squares", "several", "a context of its own", "a view")


def autocast(x, w):
    with torch.autocast("cpu", dtype=torch.float64, enabled=False):
        return of.Chunked.apply(x, w)[1]


def foreach(value):
    found = [torch.zeros(())]
    torch._foreach_add_(found, [value])
    return found[0]


def indexed(value):
    found = torch.zeros(2)
    found[0] = value
    return found.sum()


LAYOUTS = {
    "both cut": ((Shard(0), Shard(1)), (Replicate(), Replicate())),
    "rows": ((Shard(0), Replicate()), (Replicate(), Shard(0))),
    "columns": ((Replicate(), Shard(1)), (Shard(0), Shard(0))),
    "whole": ((Replicate(), Replicate()), (Replicate(), Replicate())),
    "partial": ((Partial(), Shard(0)), (Replicate(), Partial())),
    "interleaved": (
        (InterleavedShard(1, 2), Replicate()),
        (RaggedShard((0, 1), (0, 5)), Replicate()),
    ),
}


def gradients(place, program, layouts, leaf):
    x, w = place(X, *layouts[0], grad=True), place(W, *layouts[1], grad=True)
    loss = program(x if leaf else x * 1, w)
    loss.backward(retain_graph=True)
    first = [x.grad, w.grad]
    first = [None if g is None else g.clone() for g in first]
    loss.backward()
    return [loss, first, x.grad, w.grad]


def second_gradients(place, program, layouts, leaf):
    x, w = place(X, *layouts[0], grad=True), place(W, *layouts[1], grad=True)
    loss = program(x if leaf else x * 1, w)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    first.square().sum().backward()
    return [first, x.grad, w.grad]


def run_program(rank, world, name):
    for layouts in LAYOUTS.values():
        for leaf in (True, False):
            check(lambda place: gradients(place, PROGRAMS[name], layouts, leaf))  # noqa: B023
            if name in TWICE:
                check(lambda place: second_gradients(place, PROGRAMS[name], layouts, leaf))  # noqa: B023
    assert sys.getprofile() is None


# Where `apply` is C, nobody sees the object that stands for a plain tensor given back as it came.
UNSEEN = () if apply_code is not None else ("plain beside, a leaf", "plain beside")


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {*UNSEEN}))
def test_as_on_one_device(name):
    simulate(4)(run_program, name)


@pytest.mark.parametrize("name", ["rows and mean", "checkpointed", "several"])
def test_in_processes(name):
    run(run_program, 4, name)


@pytest.mark.parametrize("name", ["mean", "chained", "a context of sizes"])
def test_where_the_profiler_sees_no_apply(name, monkeypatch):
    monkeypatch.setattr(function_results, "apply_code", None)
    simulate(4)(run_program, name)


@pytest.mark.skipif(apply_code is not None, reason="`Function.apply` is Python in this torch")
@pytest.mark.parametrize("name", UNSEEN)
def test_a_plain_tensor_given_back_is_refused(name):
    with pytest.raises(SimulationError, match="returned plain tensors"):
        simulate(4)(run_program, name)


CASES, case = named_cases()


@case
def hooks_flags_and_grad_of_a_plain_result(place):
    x, w, seen = place(X, grad=True), place(W, grad=True), []
    rows, mean = of.Chunked.apply(x, w)
    assert rows.requires_grad
    assert not rows.is_leaf
    assert "Backward" in rows.grad_fn.name()
    rows.register_hook(lambda g: seen.append(g) or g * 2)
    rows.retain_grad()
    (rows.sum() * mean).backward()
    return [rows, mean, rows.grad, seen, x.grad, w.grad]


@case
def without_grad_nothing_is_joined(place):
    x, w = place(X, grad=True), place(W, grad=True)
    with torch.no_grad():
        rows, mean = of.Chunked.apply(x, w)
    assert not rows.requires_grad
    assert rows.grad_fn is None
    with torch.inference_mode():
        of.Chunked.apply(x.detach(), w.detach())
    return [rows, mean, of.Chunked.apply(x.detach(), w.detach())]


@case
def a_training_step_of_a_batch_that_is_cut(place):
    """A mean over gathered rows is the mean over the batch, and so is its gradient."""
    x, w = place(X, Shard(0), Replicate()), place(W, Replicate(), Replicate(), grad=True)
    optimizer = torch.optim.SGD([w], lr=0.5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = of.Chunked.apply(x, w)[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return [losses, w]


@case
def what_raises_inside_leaves_nothing_behind(place):
    class Failing(of.Squares):
        @staticmethod
        def forward(ctx, x):
            torch.zeros(()).add_(x.sum())
            raise ValueError("of the user")

    x = place(X, grad=True)
    with pytest.raises(ValueError, match="of the user"):
        Failing.apply(x)
    assert sys.getprofile() is None
    loss = of.Squares.apply(x)
    loss.backward()
    return [loss, x.grad]


@case
def a_write_to_what_was_saved_is_noticed(place):
    x = place(X, grad=True) * 1
    loss = of.Squares.apply(x) + 0
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@case
def a_plain_result_that_was_saved_cannot_be_differentiated_again(place):
    x, w = place(X, grad=True), place(W, grad=True)
    (first,) = torch.autograd.grad(of.Chunked.apply(x, w)[1], x, create_graph=True)
    if place.mesh is None:
        return
    with pytest.raises(vd.UnsupportedError, match="returned plain tensors"):
        first.sum().backward()


@pytest.mark.parametrize("name", CASES)
@on_ranks(4, simulated=True)
def test_cases(name):
    check(CASES[name])


@on_ranks(4)
def test_a_profiler_of_somebody_else_stays():
    """A profiler of somebody else stays; without ours, the backward says what is missing."""
    x, seen = Place(device_mesh((2, 2), ("dp", "tp")))(X, grad=True), []

    def profiler(*event):
        seen.append(event)

    sys.setprofile(profiler)
    try:
        loss = of.Squares.apply(x)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    with pytest.raises(vd.UnsupportedError, match="returned plain tensors"):
        loss.backward()


def noted(rank, world):
    function_results._noted.clear()
    x, seen = Place(device_mesh((2, 2), ("dp", "tp")))(X, grad=True), []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("vescale_dtensor").addHandler(handler)
    try:
        for _ in range(3):
            of.Squares.apply(x)
    finally:
        logging.getLogger("vescale_dtensor").removeHandler(handler)
    return seen


def test_it_is_said_once():
    found = run(noted, 4)
    assert [len(notes) for notes in found] == [1, 0, 0, 0]
    assert "Squares.apply gave plain tensors" in found[0][0]
