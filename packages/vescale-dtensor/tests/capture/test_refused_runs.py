"""`capture(refused="run")`: what cannot be recorded runs as in eager mode, and nothing runs twice.

Every function that capture refuses is called beside itself: same results or errors, same random
numbers, each side effect once per call, in the call in which the refusal is found as in later ones.
"""

import numpy
import pytest
import torch
import torch.distributed as dist
import vescale_dtensor as vd
from capture_guards import line, rows, spread
from test_refusals import CASES
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_dtensor import Replicate

CALLS = 3


def surrounded(function):
    """The function between side effects of each kind, with what they change."""
    log, count = [], torch.zeros(())

    def call(x):
        log.append("begins")
        count.add_(1)
        try:
            return torch.rand(()), function(x), torch.rand(())
        finally:
            count.mul_(2)
            log.append("ends")

    return call, log, count


def outcome(function, seed, count=5):
    """What one call gives: results, or the type of an error; and what it did."""
    call, log, count = function
    torch.manual_seed(seed)
    try:
        found = call(spread(rows(count, seed=seed).abs() + 2))
    except Exception as error:
        found = type(error)
    return found, list(log), count.item(), torch.get_rng_state()


def alike(one, two):
    """Whether two results are the same, bit for bit."""
    if isinstance(one, vd.DTensor):
        one, two = (one.placements, one.to_local()), (two.placements, two.to_local())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two) and one.requires_grad == two.requires_grad
    ones, twos = tree_flatten(one)[0], tree_flatten(two)[0]
    if len(ones) == 1 and ones[0] is one:
        if isinstance(one, numpy.ndarray):
            return numpy.array_equal(one, two)
        # Memory, and nodes of autograd, are another object in each call.
        return type(one) is type(two) and (not isinstance(one, bool | float | str) or one == two)
    return len(ones) == len(twos) and all(map(alike, ones, twos))


@on_ranks(2)
def test_every_refused_function_runs_as_in_eager_mode():
    different = []
    for name, (function, reason) in CASES.items():
        eager, call = surrounded(function), surrounded(function)
        captured = vd.capture(call[0], refused="run")
        twin = captured, *call[1:]
        count = 6 if name == "raw_collective" else 5  # which wants shards of one size
        for seed in range(CALLS):
            expected, found = outcome(eager, seed, count), outcome(twin, seed, count)
            if not alike(expected, found):
                different.append((name, seed, expected[:3], found[:3]))
        raised = isinstance(found[0], type)  # by eager mode as well, after the refusal
        if captured.programs or not (raised or reason in (captured.refusal or "")):
            different.append((name, captured.refusal))
    assert not different, different


def refused_after_it_ran(rank, world_size):
    """What is found at the end only: changes in call after call, results that are made once."""
    log = []

    def hoarding(x):
        log.append(1)
        return x * 2

    captured = vd.capture(hoarding, refused="run")
    for call in range(CALLS):
        assert (captured.refusal is not None) == (call > 1)
        assert torch.equal(captured(spread(rows())).full_tensor(), rows() * 2)
        assert len(log) == call + 1
    assert "in call after call" in captured.refusal
    sets = vd.capture(lambda x: {x.dim()}, refused="run")
    assert all(sets(spread(rows())) == {2} for _ in range(CALLS))
    assert "is returned, of which each call" in sets.refusal


def programs_stay(rank, world_size):
    """A refused kind of call leaves the programs of others; inner functions are replayed."""
    inner = vd.capture(lambda x: (x * 2).relu())

    def outer(x, log):
        y = inner(x)
        return y.sum().item() if log else y.sum()

    captured = vd.capture(outer, refused="run")
    captured(spread(rows()), False)
    for seed in range(CALLS):
        x = spread(rows(seed=seed))
        expected = (rows(seed=seed) * 2).relu().sum()
        assert captured(x, True) == pytest.approx(expected.item())
        torch.testing.assert_close(captured(x, False).full_tensor(), expected)
    assert "item reads" in captured.refusal
    assert len(captured.programs) == len(inner.programs) == 1
    assert captured._misses.replays == CALLS
    assert inner._misses.replays == CALLS - 2


def checked_inside(rank, world_size):
    """What only one rank runs, captured functions inside compare nothing over ranks."""
    inner = vd.capture(lambda x: (x * torch.arange(4.0)).sum(), check=True)

    def reading(x, more):
        y = inner(x)
        if rank == 0:
            y.to_local().item()
        return inner(x) + y

    def given(x, more):
        return inner(x) + inner(x)

    for outer in (reading, given):
        captured = vd.capture(outer, refused="run", check="sampled")
        for seed in range(5):
            more = iter([1]) if outer is given and rank == 0 else None
            found = captured(spread(rows(seed=seed)), more)
            assert torch.equal(found.full_tensor(), outer(spread(rows(seed=seed)), more))
        assert (captured.refusal is None) == (rank != 0)
    for seed in range(3):  # counted alike on all ranks, whoever has run it before
        inner(spread(rows(seed=seed)))


def lineages_of_threads(rank, world_size):
    """What one rank records leaves the writes of another one noted."""
    weight, captured = spread(torch.ones(5, 4)), vd.capture(lambda x: x.sum().full_tensor())
    for seed in range(3):
        weight.add_(1)
        captured(spread(rows(seed=seed)))
    lineages = [torch.zeros(2, dtype=torch.long) for _ in range(world_size)]
    dist.all_gather(lineages, torch.tensor([weight._lineage, 1]))
    assert torch.equal(*lineages)


def hooks_inside_of_others(rank, world_size):
    """Checkpointing inside is refused also where other hooks are active around the call."""
    weight = spread(torch.ones(4), Replicate()).requires_grad_()
    runs = []

    def body(x):
        runs.append(1)
        return (x * weight).sin()

    def inside(x):
        return checkpoint(body, x, use_reentrant=False)

    captured = vd.capture(inside, refused="run")
    strictly = vd.capture(inside)
    for _ in range(CALLS):
        x = spread(rows()).requires_grad_()
        with torch.autograd.graph.save_on_cpu():
            with pytest.raises(vd.CaptureError, match="saved-tensor hooks"):
                strictly(x)
            runs.clear()
            y = captured(x)
        assert len(runs) == 1
        y.sum().backward()
        assert len(runs) == 2  # again in backward, as in eager mode
    assert "saved-tensor hooks" in captured.refusal


def training(rank, world_size):
    """A step that is refused in its middle trains as in eager mode."""
    torch.manual_seed(0)
    made = [vd.distribute_module(nn.Linear(4, 3), line()) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    found = []
    for model, wrap in zip(
        made, (lambda f: f, lambda f: vd.capture(f, refused="run")), strict=True
    ):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = nn.functional.dropout(model(x), 0.3).square().mean()
            loss.backward()
            if loss.item() > 0:
                optimizer.step()
            return loss

        wrapped = wrap(step)
        losses = []
        for seed in range(4):
            torch.manual_seed(seed)
            losses.append(wrapped(spread(rows(seed=seed))).full_tensor())
        found.append([*losses, *(p.full_tensor() for p in model.parameters())])
    assert all(map(torch.equal, *found))


class Plain(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.full_tensor() * 2)
    backward = staticmethod(lambda ctx, gradient: gradient * 2)


def plain_results(rank, world_size):
    """A Function that gives plain tensors is joined in the call in which it is refused, too."""
    gradients = []
    for wrap in (lambda f: f, lambda f: vd.capture(f, refused="run")):
        weight = spread(torch.ones(4), Replicate()).requires_grad_()
        step = wrap(lambda x, weight=weight: (Plain.apply(x * weight) * 3).sum())
        for seed in range(CALLS):
            step(spread(rows(seed=seed))).backward()
            gradients.append(weight.grad.full_tensor())
    assert "custom autograd.Function" in step.refusal
    assert all(map(torch.equal, gradients[:CALLS], gradients[CALLS:]))


RUN_ON = [
    refused_after_it_ran,
    programs_stay,
    checked_inside,
    lineages_of_threads,
    hooks_inside_of_others,
    training,
    plain_results,
]


@pytest.mark.parametrize("case", RUN_ON, ids=lambda case: case.__name__)
def test_what_runs_on(case):
    simulate(2)(case)


@on_ranks(2)
def test_ranks_that_differ_in_what_is_refused(rank, world_size):
    """Ranks may differ in what is refused: they communicate the same, also where they compare."""

    def step(x, weight):
        loss = (x * weight).sum()
        if rank == 0:
            loss.to_local().item()
        return loss

    captured = vd.capture(step, refused="run", check="sampled")
    weight = spread(torch.ones(4), Replicate())
    for seed in range(9):
        x = rows(seed=seed)
        assert torch.equal(
            captured(spread(x), weight).full_tensor(), step(spread(x), weight).full_tensor()
        )
    assert bool(captured.programs) == (rank != 0)


def test_another_word_is_an_error():
    with pytest.raises(ValueError, match="'raise' or 'run'"):
        vd.capture(torch.sin, refused="runs")
