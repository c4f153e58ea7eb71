"""Property: under `consistent(data=...)`, torch's data parallelism is one device, bit by bit.

FSDP2, DDP, HSDP, and FSDP2 with tensor and sequence parallelism train in real processes with
dropout everywhere, on uneven batches (a rank with fewer rows, a rank with none), with gradients
accumulated over several batches and with activations recomputed. Losses of each row, gradients,
parameters and the generators are those of one device.
"""

from itertools import product

import pytest
import torch
from batch_ranks import RANKS, SEED, Model, batch, descend, exact, loss_of, one_device, rows_of, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from vescale_rng.torch_dtensor import consistent

# Rows of the batches that one step accumulates: even; uneven; and one rank holds nothing.
TOTALS = (8, 11, 9)


def fsdp2(model, world):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]), mesh["dp"], lambda x: x


def ddp(model, world):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    return DistributedDataParallel(model), mesh.get_group(), lambda x: x


def hsdp(model, world):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), mesh, lambda x: x


def hsdp_axes(model, world):
    wrapped, mesh, enter = hsdp(model, world)
    return wrapped, (mesh["replicate"], mesh["shard"]), enter


def fsdp2_tp(model, world):
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        columns = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
        rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        parallelize_module(block, mesh["tp"], {"up": columns, "down": rows})
        fully_shard(block, mesh=mesh["dp"])
    model.flattened = False

    def enter(x):
        return DTensor.from_local(x, mesh["tp"], [Replicate()]).redistribute(placements=[Shard(1)])

    return fully_shard(model, mesh=mesh["dp"]), mesh["dp"], enter


RECIPES = {f.__name__: f for f in (fsdp2, ddp, hsdp, hsdp_axes, fsdp2_tp)}


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(rank, world, name, recompute, options):
    ranks = world // 2 if name == "fsdp2_tp" else world
    index = rank // 2 if name == "fsdp2_tp" else rank
    model, data, enter = RECIPES[name](exact(Model(recompute)), world)
    torch.manual_seed(SEED)
    losses, gradients = [], []
    with consistent(data=data, **options):
        for _ in range(2):
            for total in TOTALS:
                x = batch(total)[rows_of(total, ranks, index)]
                rows = full(loss_of(model(enter(x))))
                losses.append(rows.detach())
                rows.sum().backward()
            gradients.append({name: full(p.grad) * ranks for name, p in model.named_parameters()})
            descend(model)
    parameters = {name: full(p).detach() for name, p in model.named_parameters()}
    return losses, gradients, parameters, torch.get_rng_state()


def check(name, recompute=False, **options):
    def make():
        model = Model()
        model.flattened = name != "fsdp2_tp"
        return model

    losses, gradients, parameters, state = one_device(make, TOTALS)
    ranks = RANKS // 2 if name == "fsdp2_tp" else RANKS
    for rank, found in enumerate(run(train, name, recompute, options)):
        index = rank // 2 if name == "fsdp2_tp" else rank
        for at, expected in enumerate(losses):
            mine = rows_of(TOTALS[at % len(TOTALS)], ranks, index)
            assert torch.equal(found[0][at], expected[mine]), (rank, at)
        for expected, own in zip(gradients, found[1], strict=True):
            for one in expected:
                name_here = f"module.{one}" if name == "ddp" else one
                assert torch.equal(own[name_here], expected[one]), (rank, one)
        assert torch.equal(found[3], state), rank
        assert all(
            torch.equal(a, b) for a, b in zip(found[2].values(), parameters.values(), strict=True)
        )


@pytest.mark.parametrize(
    ("recompute", "name"),
    [*product([False], RECIPES), *product([True], ["fsdp2", "ddp", "fsdp2_tp"])],
)
def test_a_training_is_that_of_one_device(name, recompute):
    check(name, recompute)
