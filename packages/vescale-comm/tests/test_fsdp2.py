"""FSDP2 with ordered reductions has the gradients of one process, bit by bit.

Random data, of which the sum depends on the order; gradients that torch's own reduce-scatter gives
are shown to differ. Compressed ones are within the bound of their format.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from vescale_comm import fsdp2, trace
from vescale_comm.testing import outcomes
from vescale_comm_worlds import run


def model():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 5, bias=False), nn.LayerNorm(5), nn.Linear(5, 1)
    )


def microbatch(index):
    generator = torch.Generator().manual_seed(index)
    return torch.randn(7, 13, generator=generator)


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


def sharded(policy=None):
    module = model()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    options = {} if policy is None else {"mp_policy": policy}
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def one_microbatch_each(rank, world_size, how):
    module = sharded()
    if how is not None:
        fsdp2.install(module, **how)
    with trace() as t:
        loss_of(module, rank).backward()
    return gradients(module), t.counts()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_have_the_bits_of_microbatches_one_after_the_other(world_size):
    expected = sequential(world_size)
    for found, counts in run(one_microbatch_each, world_size, {"order": "rank"}):
        assert all(map(torch.equal, found, expected))
        assert counts == {"reduce_scatter": 3}


def test_without_it_they_have_not():
    from vescale_comm.testing import run as run_processes

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


def wrong(rank, world_size, name):
    if name == "plain":
        fsdp2.install(model())
    elif name == "order":
        fsdp2.install(sharded(), order="ring")
    elif name == "wire":
        fsdp2.install(sharded(), wire="fp4")
    elif name == "replicated":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        fsdp2.install(fully_shard(model(), mesh=mesh))
    else:
        module = fsdp2.install(sharded())
        module.set_gradient_divide_factor(3.0)
        loss_of(module, rank).backward()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plain", "no module in Sequential was given to fully_shard"),
        ("order", "unknown order 'ring'"),
        ("wire", "unknown wire format 'fp4'"),
        ("replicated", "the all-reduce between replicas is torch's own"),
    ],
)
def test_what_cannot_be_is_named(name, words):
    for outcome in outcomes(wrong, 2, name):
        assert outcome.type_name == "CommArgumentError"
        assert words in outcome.message
