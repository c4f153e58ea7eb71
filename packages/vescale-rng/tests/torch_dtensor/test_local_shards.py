"""Property: under `consistent(data=...)` nothing is drawn into a shard whose place nobody knows.

`to_local` of a DTensor that tensor parallelism divides gives a plain tensor, by default at the end
of a `ColwiseParallel` layer: drawn as rows of the batch, it would have another mask than on one
device, in silence. What is the same along the other axes is drawn as before.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from batch_ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from vescale_rng import RngError
from vescale_rng.torch_dtensor import consistent


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, cotangent):
        return 2 * cotangent


def written(x):
    buffer = torch.zeros(x.shape)
    buffer.copy_(x)
    return buffer


def gathered(x):
    everywhere = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, x.detach().contiguous())
    return everywhere[0]


# What is computed of a local shard, and whether one device's numbers can be drawn into it.
COMPUTED = {
    "itself": (lambda x: x, False),
    "detached": (lambda x: x.detach(), False),
    "a view": (lambda x: x.transpose(0, 1)[:, 1:].unsqueeze(0), False),
    "a result": (lambda x: F.gelu(x) + 1, False),
    "of a Function": (Double.apply, False),
    "one of several": (lambda x: x.chunk(2, -1)[1], False),
    "written": (written, False),
    "made alike": (lambda x: x.new_empty(x.shape), False),
    "not dropped before": (lambda x: F.dropout(x, 0.5, training=False), False),
    "one number a row": (lambda x: x.new_empty((len(x), 1, 1)), True),
    "gathered": (gathered, True),
    "another tensor": (lambda x: torch.ones(4, 3), True),
}
DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "in place": lambda x: x.detach().normal_(),
    "alike": torch.rand_like,
    "truncated": lambda x: nn.init.trunc_normal_(x.detach()),
}


def refused(call, *args):
    try:
        call(*args)
    except RngError as error:
        return "use_local_output=False" in str(error)
    return False


def draws(rank, world, shape, options):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    found, torch_state = {}, torch.get_rng_state()
    with consistent(data=mesh["dp"], **options):
        x = distribute_tensor(torch.ones(8, 4, 6), mesh["tp"], [Shard(2)])
        local = x.requires_grad_().to_local()
        for name, (compute, _) in COMPUTED.items():
            for draw in ("dropout",) if name != "itself" else DRAWS:
                torch.set_rng_state(torch_state)
                found[name, draw] = refused(DRAWS[draw], compute(local))
        with torch.no_grad():
            found["without grad", ""] = refused(F.dropout, x.to_local())
        for name, placement in (("sum", Partial()), ("whole", Replicate())):
            one = DTensor.from_local(torch.ones(8, 4), mesh["tp"], [placement]).to_local()
            found[name, ""] = refused(F.dropout, one)
        rows = DTensor.from_local(torch.ones(8, 4), mesh, [Shard(0), Replicate()])
        found["rows", ""] = refused(F.dropout, rows.to_local())
        weight = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh["tp"], [Shard(0)]))
        found["weight", ""] = refused(nn.init.trunc_normal_, weight.to_local())
        torch.set_rng_state(torch_state)
    return found


@pytest.mark.parametrize(("shape", "options"), [((2, 2), {}), ((2, 2), {"rows": 8}), ((1, 2), {})])
def test_what_is_drawn_of_a_local_shard(shape, options):
    for found in run(draws, shape, options, ranks=shape[0] * shape[1]):
        for (name, draw), is_refused in found.items():
            allowed = COMPUTED[name][1] if name in COMPUTED else name in ("whole", "rows")
            assert is_refused != allowed, (name, draw)
        assert len(found) == len(COMPUTED) + len(DRAWS) - 1 + 5


class Layers(nn.Sequential):
    def __init__(self, inside):
        torch.manual_seed(1)
        inner = [nn.Dropout()] if inside else []
        super().__init__(nn.Linear(4, 8), nn.GELU(), *inner, nn.Linear(8, 4), nn.Dropout())


def megatron(rank, world, inside):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, x = Layers(inside), torch.randn(6, 4)
    torch.manual_seed(2)
    expected = model(x)[3 * (rank // 2) :][:3]
    # As torch's tutorials write it: both hand on local tensors.
    last = str(len(model) - 2)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), last: RowwiseParallel()})
    torch.manual_seed(2)
    with consistent(data=mesh["dp"]):
        if inside:
            return refused(model, x)
        found = model(x[3 * (rank // 2) :][:3])
    torch.testing.assert_close(found, expected)
    return not torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("inside", [False, True])
def test_tensor_parallel_layers_as_torch_has_them(inside):
    assert all(run(megatron, inside))
