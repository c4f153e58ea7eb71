"""Programs as objects: bounded, printable, checked, transformed, and holding nothing they need not.

Every check runs on the ranks of a mesh dp=2 x tp=2.
"""

import gc
import re
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from capture_semantics import Mlp, data, grid, spread
from torch import fx
from vescale_comm import trace
from vescale_comm.testing import run
from vescale_dtensor import Replicate, Shard

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


@check
def planning_is_no_part_of_it():
    """Tensors whose dims lie in odd orders make dispatch ask torch, on small ones of its own."""
    captured = vd.capture(lambda x, y: x.transpose(0, 1) * 3 + y.transpose(0, 1))
    captured(spread(data(5, 7), tp=Shard(0)), spread(data(5, 7), tp=Shard(0)))
    (program,) = captured.programs
    assert len([n for n in program.graph.nodes if n.op.startswith("call")]) == 4, program.explain()


@check
def programs_are_bounded():
    captured = vd.capture(lambda x, n: x * n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an argument that is another number each time
        for number in range(50):
            captured(spread(data(4)), number)
    assert len(captured.programs) == 16  # of one kind
    captured(spread(data(4)), 49)
    assert len(captured.programs) == 16


@check
def a_program_is_a_graph_module():
    model = Mlp(grid())
    captured = vd.capture(model)
    x = spread(data(5, 6), Shard(0))
    captured(x)
    (program,) = captured.programs
    assert isinstance(program.graph_module, fx.GraphModule)
    assert isinstance(program.graph, fx.Graph)
    program.graph.lint()
    # Run by hand: local tensors in, local tensors out.
    model.eval()
    captured(x)
    program = captured.programs[0]
    (local,) = program.graph_module(*program.arguments([x]))
    assert type(local) is torch.Tensor
    assert torch.equal(local, model(x)._local_tensor)


@check
def the_listing_names_layouts_ops_and_bytes():
    captured, x = vd.capture(Mlp(grid())), spread(data(5, 6), Shard(0))
    captured(x)
    text = captured.programs[0].explain()
    assert "f32[5@dp, 8@tp]; torch.nn.functional.gelu" in text
    assert "f32[5@dp, 6], +tp; torch.nn.functional.linear" in text
    captured = vd.capture(
        lambda x: x.redistribute(placements=[Replicate(), Replicate()]), check=None
    )
    captured(x)
    with trace() as traced:
        captured(x)
    text = captured.programs[0].explain()
    assert f"all_gather over dp, {traced.bytes():,} B" in text
    total = f"1 collectives, {traced.bytes():,} bytes sent by this rank"
    assert text.splitlines()[-1].endswith(total)


@check
def a_replay_makes_no_wrapper_but_its_outputs():
    captured = vd.capture(Mlp(grid()), check=None)
    x = spread(data(5, 6), Shard(0))
    captured(x)
    seen = []
    original = vd.DTensor.__torch_function__
    vd.DTensor.__torch_function__ = lambda *args: seen.append(args) or original(*args)
    try:
        captured(x)
    finally:
        vd.DTensor.__torch_function__ = original
    assert not seen


@check
def collectives_are_those_of_eager():
    model = Mlp(grid())
    captured, x = vd.capture(model, check=None), spread(data(5, 6), Shard(0))
    counts = []
    for function in (model, captured, captured):
        model.zero_grad()
        with trace() as traced:
            function(x).square().sum().backward()
        counts.append([(r.op, r.group, r.bytes) for r in traced.records])
    assert counts[0] == counts[1] == counts[2]


@check
def nothing_of_a_recording_is_kept():
    captured = vd.capture(lambda x: (x * 2).sin().sum())
    x = spread(data(5, 6), grad=True)
    result = captured(x)
    gone = [weakref.ref(t) for t in (x, x._local_tensor, result, result._local_tensor)]
    del result, x
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4
    assert len(captured.programs) == 1


@check
def a_weak_reference_to_what_counts_as_constant_is_followed():
    pattern = re.compile("constant")
    known, x = weakref.ref(pattern), spread(data(5, 6))
    captured = vd.capture(lambda x: x * (2 if known() is pattern else 3))
    for _ in range(3):
        assert torch.equal(captured(x).to_local(), (x * 2).to_local())
    assert captured.replays == 2


@check
def explain_and_strict_see_every_op():
    captured, x = vd.capture(Mlp(grid())), spread(data(5, 6), Shard(0))
    captured(x), captured(x)
    with vd.explain() as report:
        captured(x)
    assert "gelu" in str(report)
    with vd.strict(), pytest.raises(vd.StrictError):
        vd.capture(lambda x: torch.linalg.qr(x))(x)
    assert len(captured.programs) == 1


@check
def a_transform_runs_in_place_of_the_program():
    made = []

    def doubling(module):
        made.append(module)
        return lambda *args: tuple(2 * result for result in module(*args))

    captured, x = vd.capture(torch.sin, transform=doubling), spread(data(5, 6), Shard(0))
    assert torch.equal(captured(x)._local_tensor, x.sin()._local_tensor)
    assert torch.equal(captured(x)._local_tensor, 2 * x.sin()._local_tensor)
    assert isinstance(made[0], fx.GraphModule)


@check
def checked_replays_agree():
    model, buffer = Mlp(grid()), spread(torch.zeros(6))

    def step(x):
        buffer.add_(1)
        model.zero_grad()
        loss = model(x).square().mean() + buffer.sum()
        loss.backward()
        return {"loss": loss.detach(), "x": x.mul_(2)}

    captured = vd.capture(step, check=True)
    for number in range(4):
        captured(spread(data(5, 6, seed=number), Shard(0)))
    assert torch.equal(buffer.full_tensor(), torch.full((6,), 4.0))
    assert len(captured.programs) == 2


@check
def a_pinned_leaf_may_vary_elsewhere():
    """A parameter that a program uses as it is keeps whole contributions: others sum theirs."""
    dense = data(6).requires_grad_()
    weight = spread(data(6), grad=True)
    captured = vd.capture(lambda x: x * weight)
    for number in range(3):
        weight.grad = dense.grad = None
        inside = captured(spread(data(5, 6, seed=number), Shard(0))).sum()
        outside = (spread(data(5, 6), tp=Shard(0)) * weight).square().sum()
        (inside + outside).backward()
        (data(5, 6, seed=number) * dense).sum().backward()
        (data(5, 6) * dense).square().sum().backward()
        torch.testing.assert_close(weight.grad.full_tensor(), dense.grad)
    assert len(captured.programs) == 1


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_programs(name):
    run(run_check, 4, name)


def run_check(rank, world_size, name):
    CHECKS[name]()


def unseen_state(rank, what):
    """A function that does something else from its second call on."""
    calls = []

    def stateful(x):
        calls.append(None)
        change = what if len(calls) > 1 else None
        if change == "random":
            F.dropout(x)
        if change == "write":
            x.add_(1)
        x.add_(0)
        if change == "value" or (change == "one rank" and rank == 3):
            return x * 2, x * 3
        if change == "layout":
            return x * 2, (x * 1).redistribute(placements=[Replicate(), Replicate()])
        if change == "number":
            return x * 2, 3
        return x * 2, x * 1

    captured = vd.capture(stateful, check=True, unguarded=["calls"])
    captured(spread(data(5, 6), Shard(0)))
    captured(spread(data(5, 6), Shard(0)))


def differences(rank, world_size):
    for what, named in {
        "value": "output 1",
        "one rank": "The function depends on something",
        "layout": "output 1",
        "number": "output 1",
        "random": "random generators",
        "write": "output 0",
    }.items():
        with pytest.raises(vd.CaptureError, match=named):
            unseen_state(rank, what)


def test_checking_names_the_first_difference_on_every_rank():
    run(differences, 4)
