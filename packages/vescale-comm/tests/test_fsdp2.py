"""FSDP2 with ordered reductions has the gradients of one process, bit by bit.

Random data, of which the sum depends on the order; gradients that torch's own reduce-scatter gives
are shown to differ. Compressed ones are within the bound of their format.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from vescale_comm import CommArgumentError, fsdp2
from vescale_comm.testing import run as run_processes
from vescale_comm_worlds import refusals, run, trace_of_ours


def model():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 5, bias=False), nn.LayerNorm(5), nn.Linear(5, 1)
    )


def microbatch(index):
    return torch.randn(7, 13, generator=torch.Generator().manual_seed(index))


def loss_of(module, index, scale=1.0):
    return module(microbatch(index)).square().mean() * scale


def gradients(module):
    full = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            for p in module.parameters()]  # fmt: skip
    return [x.detach().clone() for x in full]


def sequential(count):
    """One process: the microbatches one after the other, then one division."""
    module = model()
    for index in range(count):
        loss_of(module, index).backward()
    return [grad / count for grad in gradients(module)]


def in_a_tree(count):
    """One process: gradients of neighbours are added first."""
    level = []
    for index in range(count):
        module = model()
        loss_of(module, index).backward()
        level.append(gradients(module))
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [[a + b for a, b in zip(one, two, strict=True)] for one, two in pairs]
    return [grad / count for grad in level[0]]


def sharded(policy=None, mesh=None):
    module = model()
    mesh = mesh or init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    options = {} if policy is None else {"mp_policy": policy}
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def one_microbatch_each(rank, world_size, how):
    module = sharded()
    if how is not None:
        fsdp2.install(module, **how)
    with trace_of_ours() as t:
        loss_of(module, rank).backward()
    return gradients(module), t.counts()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_have_the_bits_of_microbatches_one_after_the_other(world_size):
    expected = sequential(world_size)
    for found, counts in run(one_microbatch_each, world_size, {"order": "rank"}):
        assert all(map(torch.equal, found, expected))
        assert counts == {"reduce_scatter": 3}


def test_without_it_they_have_not():
    found = run_processes(one_microbatch_each, 4, None)[0][0]
    assert not all(map(torch.equal, found, sequential(4)))


def several_microbatches_each(rank, world_size, total):
    module = fsdp2.install(sharded(), order="tree")
    each = total // world_size
    for step in range(each):
        module.set_requires_gradient_sync(step == each - 1)
        # Scaled by a power of two: exact, wherever it is done.
        loss_of(module, rank * each + step, scale=1 / each).backward()
    return gradients(module)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_same_four_microbatches_have_the_same_bits_on_any_number_of_ranks(world_size):
    expected = in_a_tree(4)
    for found in run(several_microbatches_each, world_size, 4):
        assert all(map(torch.equal, found, expected))


def hybrid(rank, world_size, shape, how):
    module = sharded(mesh=init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")))
    if how is not None:
        fsdp2.install(module, **how)
    with trace_of_ours() as t:
        loss_of(module, rank).backward()
    return gradients(module), t.counts()


@pytest.mark.parametrize(("shape", "order"), [((2, 2), "rank"), ((2, 2), "tree"), ((3, 2), "rank")])
def test_hybrid_sharding_has_the_same_bits(shape, order):
    world_size = shape[0] * shape[1]
    expected = in_a_tree(4) if order == "tree" else sequential(world_size)
    for found, counts in run(hybrid, world_size, shape, {"order": order}):
        assert all(map(torch.equal, found, expected))
        assert counts == {"reduce_scatter": 3}


def test_a_mesh_of_one_copy_is_a_mesh_of_one_axis():
    for found, _ in run(hybrid, 2, (1, 2), {"order": "rank"}):
        assert all(map(torch.equal, found, sequential(2)))


def hybrid_and_accumulated(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    module = fsdp2.install(sharded(mesh=mesh), wire="bf16")
    for step in range(2):
        module.set_requires_all_reduce(step == 1)
        loss_of(module, 4 * step + rank, scale=1 / 2).backward()
    return gradients(module)


def test_hybrid_sharding_accumulates_and_compresses():
    expected = sequential(8)
    for found in run(hybrid_and_accumulated, 4):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0.02, atol=0.02 * y.abs().max().item())


def beside_tensor_parallelism(rank, world_size, how):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(13, 36), nn.Tanh(), nn.Linear(36, 1), nn.Tanh())
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    module = fully_shard(parallelize_module(module, mesh["tp"], styles), mesh=mesh["dp"])
    if how is not None:
        fsdp2.install(module, **how)
    module(microbatch(rank // 2)).square().mean().backward()
    assert any(p.placements[1].is_replicate() for p in module.parameters())
    return gradients(module)


def test_what_is_replicated_on_an_axis_of_tensor_parallelism_is_not_hybrid():
    # Two ranks along dp: two numbers have one sum, so that torch's own has the same bits.
    for ours, stock in zip(
        run(beside_tensor_parallelism, 4, {"order": "rank"}),
        run(beside_tensor_parallelism, 4, None),
        strict=True,
    ):
        assert all(map(torch.equal, ours, stock))


def trained(rank, world_size, how):
    module = fsdp2.install(sharded(), **how)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(5):
        loss_of(module, step * world_size + rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in module.parameters()]


def test_five_steps_of_training_have_the_bits_of_one_process():
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(5):
        for rank in range(2):
            loss_of(module, step * 2 + rank).backward()
        for p in module.parameters():
            p.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    for found in run(trained, 2, {"order": "rank"}):
        assert all(map(torch.equal, found, module.parameters()))


def half(rank, world_size):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module = fsdp2.install(sharded(policy), order="rank")
    module(microbatch(rank)).square().mean().backward()
    return gradients(module)


def test_mixed_precision_is_the_same_on_every_rank_and_in_both_worlds():
    first, *others = run(half, 3)
    assert all(all(map(torch.equal, first, other)) for other in others)


@pytest.mark.parametrize(("wire", "bound"), [("bf16", 2**-8), ("int8", 1 / 254), ("fp8", 2**-4)])
def test_compressed_gradients_are_within_the_bound_of_the_format(wire, bound):
    each = []
    for index in range(2):
        module = model()
        loss_of(module, index).backward()
        each.append(gradients(module))
    for found, _ in run(one_microbatch_each, 2, {"order": "rank", "wire": wire}):
        for x, *parts in zip(found, *each, strict=True):
            exact = (parts[0].double() + parts[1].double()) / 2
            # The largest of a block is no larger than that of all gradients.
            largest = max(g.abs().max() for grads in each for g in grads)
            assert ((x - exact).abs() <= 1.01 * bound * largest).all()


def with_another_factor(rank):
    module = fsdp2.install(sharded())
    module.set_gradient_divide_factor(3.0)
    loss_of(module, rank).backward()


def sharded_by_nobody():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fsdp2.install(fully_shard(model(), mesh=mesh))


WRONG = {
    "plain": "no module in Sequential was given to fully_shard",
    "order": "unknown order 'ring'",
    "wire": "unknown wire format 'fp4'",
    "replicated": "where every shard is the whole: torch then reduces over the copies alone",
    "factor": "fully_shard asks for",
}


def wrong(rank, world_size):
    calls = {
        "plain": lambda: fsdp2.install(model()),
        "order": lambda: fsdp2.install(sharded(), order="ring"),
        "wire": lambda: fsdp2.install(sharded(), wire="fp4"),
        "replicated": sharded_by_nobody,
    }
    with pytest.raises(CommArgumentError) as caught:
        with_another_factor(rank)
    return {**refusals(calls), "factor": ("CommArgumentError", str(caught.value))}


def test_what_cannot_be_is_named():
    for found in run_processes(wrong, 2):
        assert list(found) == list(WRONG)
        for name, (kind, words) in found.items():
            assert (kind, WRONG[name] in words) == ("CommArgumentError", True), (name, words)
