"""Where the plan says so one rank owns a matrix in full, and steps it as one device would."""

from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vescale_comm import simulate, trace
from vescale_comm.testing import run
from vescale_dtensor import DTensor
from vescale_parallel import ParallelError, Plan, Zero, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel._zero.flat_plan import SlotRequest
from vescale_parallel._zero.owners import balanced_owners, plan_owned, step_cost
from zero_models import adamw, batch, distributed, make, require_same_values, train, whole

SHAPES = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple), max_size=12)
MATRICES = ("*.{up,down}.weight", "{embed,head}.weight")


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.integers(1, 6))
def test_owners_are_balanced_by_cost(shapes: list[tuple[int, ...]], ranks: int):
    owners = balanced_owners(shapes, ranks)
    costs = [step_cost(shape) for shape in shapes]
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(ranks)]
    # Whoever got the last expensive one had the least before: nobody is further ahead than that.
    assert max(loads) - min(loads) <= max(costs, default=0)
    assert max(loads) <= ceil(sum(costs) / ranks) + max(costs, default=0)
    assert owners == balanced_owners(shapes, ranks)


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.integers(1, 6), st.sampled_from([1, 4, 8]))
def test_each_owner_has_the_whole_tensor(shapes: list[tuple[int, ...]], ranks: int, alignment: int):
    wanted = [SlotRequest((f"p{index}",), shape) for index, shape in enumerate(shapes)]
    owners = balanced_owners(shapes, ranks)
    plan = plan_owned(wanted, owners, ranks, alignment)
    by_name = {one.names: owner for one, owner in zip(wanted, owners, strict=True)}
    assert sorted(one.names for one in plan.slots) == sorted(by_name)
    for index, slot in enumerate(plan.slots):
        expected = [0] * ranks
        expected[by_name[slot.names]] = slot.numel
        assert list(plan.shares(index)) == expected
        assert slot.offset % alignment == 0
    # No more padding than alignment takes: shards are as large as what they hold.
    assert plan.padding < alignment * max(1, len(shapes))


def tiles(rank: int, world_size: int) -> None:
    model, plain = distributed(make(), {"dp": 3}, 3, block=(4, 4)), make()
    for name, one in model.named_parameters():
        if one.ndim == 2:
            assert one.to_local().numel() % (4 * one.shape[1]) == 0, name
    torch.testing.assert_close(train(model, 2), train(plain, 2), rtol=1e-5, atol=1e-6)


def test_a_model_with_tiles_trains():
    run(tiles, 3)


def blocks(rank: int, world_size: int) -> None:
    model = distributed(make(), {"dp": 4}, 3, block=16)
    for name, one in model.named_parameters():
        # Those that are smaller than a block are on one rank.
        assert one.to_local().numel() % 16 == 0 or one.to_local().numel() == one.numel(), name
    plain = make()
    torch.testing.assert_close(train(model, 2), train(plain, 2), rtol=1e-5, atol=1e-6)


def test_a_model_with_blocks_trains():
    run(blocks, 4)


def owners(rank: int, world_size: int, sizes: dict[str, int], zero: int) -> None:
    model, plain = distributed(make(), sizes, zero, owned=MATRICES), make()
    matrices = [model.blocks[0].mlp.up.weight, model.blocks[0].mlp.down.weight]
    if "tp" not in sizes:
        for one in matrices:
            assert one.to_local().numel() in (0, one.numel())
    expected, found = train(plain, 3), train(model, 3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    require_same_values(model, plain, rtol=1e-4, atol=2e-5)
    report = Plan(parameters={"*": "replicate"}, zero=Zero(zero, owned=MATRICES)).check(
        make(), {"dp": world_size}
    )
    costs = [0] * world_size
    for row in report.buffers:
        if row.owned:
            for index, slot in enumerate(row.plan.slots):
                costs[row.plan.shares(index).index(slot.numel)] += step_cost(slot.shape)
    # Six alike of 8 x 12 and the embedding of 16 x 8, over 4 ranks.
    assert max(costs) <= 2 * step_cost((8, 12))


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 2, "tp": 2}, {"replica": 2, "dp": 2}], ids=str)
def test_owned_parameters_train_like_one_device(sizes: Any, zero: int):
    run(owners, 4, sizes, zero)


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.02, weight_decay=0.1, momentum=0.9)


def step_muon(rank: int, world_size: int, sizes: dict[str, int], zero: int, owned: Any) -> None:
    model, plain = distributed(make(), sizes, zero, owned=owned), make()
    models = (model, plain)
    of_matrices = [muon([p for p in m.parameters() if p.ndim == 2]) for m in models]
    of_rest = [adamw([p for p in m.parameters() if p.ndim != 2]) for m in models]
    for step in range(3):
        model.zero_grad()
        model(*batch(step)).backward()
        # One device's own gradients differ in the order of sums: it steps with the same ones.
        for one, two in zip(model.parameters(), plain.parameters(), strict=True):
            two.grad = whole(one.grad).detach().clone()
        with trace() as seen:
            of_matrices[0].step()
        over = {axis for record in seen.records for axis in record.axes}
        if owned and "tp" not in sizes:
            assert over <= {"replica"}, [(r.op, r.axes) for r in seen.records]
        for optimizer in (of_matrices[1], *of_rest):
            optimizer.step()
        for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
            if two.ndim == 2:
                assert torch.equal(whole(one.detach()), two.detach()), (name, step)
                assert isinstance(one.grad, DTensor)
    state = of_matrices[0].state_dict()
    for key, one in of_matrices[1].state_dict()["state"].items():
        found = state["state"][key]["momentum_buffer"]
        assert isinstance(found, DTensor)
        assert torch.equal(whole(found), one["momentum_buffer"])
    of_matrices[0].load_state_dict(state)
    loss = model(*batch(0))
    of_matrices[0].step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model(*batch(0)).backward()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize(
    ("sizes", "zero", "owned"),
    [
        ({"dp": 4}, 3, MATRICES),
        ({"dp": 4}, 1, MATRICES),
        ({"replica": 2, "dp": 2}, 3, MATRICES),
        ({"dp": 3}, 2, MATRICES),
        # Sharded matrices are gathered for the step: slower, and the same numbers.
        ({"dp": 4}, 3, None),
        ({"dp": 2, "tp": 2}, 3, MATRICES),
    ],
    ids=str,
)
def test_muon_steps_as_one_device_does(sizes: Any, zero: int, owned: Any):
    run(step_muon, torch.Size(sizes.values()).numel(), sizes, zero, owned)


def closure_and_hooks(rank: int, world_size: int) -> None:
    model = distributed(make(), {"dp": 2}, 3, owned=MATRICES)
    model(*batch(0)).backward()
    optimizer = muon([p for p in model.parameters() if p.ndim == 2])
    with pytest.raises(ParallelError, match="without a closure"):
        optimizer.step(lambda: model(*batch(0)))
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ParallelError, match="not in a hook of the step"):
        optimizer.step()
    handle.remove()
    optimizer.step()


def failing(rank: int, world_size: int, zero: Any) -> None:
    model = distributed(make(tied=False), {"dp": 2}, zero, owned=MATRICES)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer = torch.optim.Muon([{"params": [p]} for p in matrices], lr=0.02)
    model(*batch(0)).backward()
    before = [whole(p.grad).clone() for p in matrices]
    optimizer.param_groups[-1]["ns_steps"] = 100  # found out when the last matrix is stepped
    with pytest.raises(ValueError, match="less than 100"):
        optimizer.step()
    for parameter, gradient in zip(matrices, before, strict=True):
        assert torch.equal(whole(parameter.grad), gradient)
    optimizer.param_groups[-1]["ns_steps"] = 5
    optimizer.step()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("zero", [3, {"head*": 0, "*": 3}], ids=str)
def test_a_step_that_raises_leaves_the_gradients(zero: Any):
    run(failing, 2, zero)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_gradients_that_come_within_the_step_are_refused():
    run(closure_and_hooks, 2)


def test_explain_tells_owners_and_the_rank_with_most():
    plan = Plan(parameters={"*": "replicate"}, zero=Zero(3, owned="blocks.*.weight"))
    report = plan.check(make(), {"dp": 4})
    assert "parameters, each on one rank" in str(report)
    by_rank = [sum(row.stored_on(rank) for row in report.buffers) for rank in range(4)]
    scalars = 3 * 4
    assert report.bytes_per_rank == max(by_rank) + scalars
    assert max(by_rank) < sum(row.stored_bytes for row in report.buffers)


def muon_in_stages(rank: int, world_size: int, zero: Any) -> None:
    model: Any = make(blocks=4, tied=False)
    plan = Plan(zero=zero, pipeline="1f1b", microbatches=2)
    parallelize(model, make_mesh(device_type="cpu", pp=2, dp=2), plan)
    optimizer = muon([p for p in model.parameters() if p.ndim == 2])
    forward_backward(model, *batch(0))
    before = [whole(p.detach()).clone() for p in model.parameters()]
    with pytest.raises(ParallelError, match="Leave zero out of the plan"):
        optimizer.step()
    assert all(map(torch.equal, before, map(whole, model.parameters())))
    elementwise = adamw(model.parameters())
    elementwise.step()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("zero", [3, {"blocks.0.*": 3, "*": 0}], ids=["all", "one stage's"])
def test_muon_of_stages_is_refused_on_every_rank(zero: Any):
    simulate(4)(muon_in_stages, zero)
