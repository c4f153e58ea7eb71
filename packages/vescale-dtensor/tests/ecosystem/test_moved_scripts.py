"""What scripts for torch.distributed.tensor do besides styles: count collectives, take
experimental functions, redistribute asynchronously, make meta tensors, call operators directly.
"""

import json

import pytest
import torch
import vescale_dtensor as vd
from named_cases import named_cases
from torch import nn
from vescale_comm import simulate, trace
from vescale_comm.testing import on_ranks
from vescale_dtensor import MeshError, Partial, Replicate, Shard
from vescale_dtensor.debug import CommDebugMode, visualize_sharding
from vescale_dtensor.experimental import implicit_replication, local_map, register_sharding
from vescale_dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from vescale_dtensor.placement_types import Placement
from vescale_dtensor.rules import register_sharding as ours

CASES, case = named_cases()
functional = torch.ops.c10d_functional
aten = torch.ops.aten


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def parallel_mlp(mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(MLP(), mesh, plan)


@case
def collectives_are_counted(mesh, folder):
    model, x = parallel_mlp(mesh), torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()  # first calls also compare what ranks pass
    mode = CommDebugMode()
    for _ in range(2):  # each block starts from nothing
        with mode:
            model(x).sum().backward()
        counts = mode.get_comm_counts()
        assert counts[functional.all_reduce] == 2
        assert counts[functional.all_gather_into_tensor] == 0
        assert mode.get_total_counts() == 2
    assert mode.get_sharding_info() == {
        "MLP.up.weight": (Shard(0),),
        "MLP.up.bias": (Shard(0),),
        "MLP.down.weight": (Shard(1),),
        "MLP.down.bias": (Replicate(),),
    }
    assert set(mode.get_parameter_info()["MLP.up"]) == {"weight", "bias"}
    assert repr(mode) == "CommDebugMode(get_total_counts()=2)"
    with mode:
        x = vd.distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
        x.redistribute(placements=[Replicate()])
        vd.DTensor.from_local(torch.ones(4), mesh, [Partial()]).redistribute(placements=[Shard(0)])
    counts = mode.get_comm_counts()
    assert counts[functional.all_gather_into_tensor] == 1
    assert counts[functional.reduce_scatter_tensor] == 1
    x = vd.distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
    x.redistribute(placements=[Replicate()])
    assert mode.get_total_counts() == 2  # nothing more after the block


@case
def collectives_are_told_by_module(mesh, folder):
    model = parallel_mlp(mesh)
    with CommDebugMode() as mode:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    table = mode.generate_comm_debug_tracing_table(noise_level=0)
    assert [line.strip() for line in table.splitlines()] == [
        "Global", "all_reduce: 1", "MLP", "MLP.up", "MLP.down", "all_reduce: 1"
    ]  # fmt: skip
    table = mode.generate_comm_debug_tracing_table()
    assert "weight: [Shard(1)]" in table
    assert "all_reduce over tp" in table
    if mesh.get_local_rank() == 0:
        mode.log_comm_debug_tracing_table_to_file(folder / "table.txt", noise_level=1)
        assert "weight: [Shard(1)]" in (folder / "table.txt").read_text()
        mode.generate_json_dump(folder / "table.json")
        found = json.loads((folder / "table.json").read_text())
        assert [entry["name"] for entry in found] == ["Global", "MLP", "MLP.up", "MLP.down"]
        assert found[3]["collectives"] == {"all_reduce": 1}
    # A forward that raises leaves nothing behind.
    with CommDebugMode() as mode:
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 3))
        x = vd.distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
        x.redistribute(placements=[Replicate()])
    assert mode.generate_comm_debug_tracing_table(0).startswith("Global\n    all_gather: 1")


@case
def experimental_functions_are_here(mesh, folder):
    assert register_sharding is ours
    assert local_map is vd.local_map
    assert issubclass(Shard, Placement)
    x = vd.distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    with implicit_replication():
        assert (x + torch.ones(4)).full_tensor().tolist() == [1.0, 2.0, 3.0, 4.0]


@case
def an_asynchronous_redistribution_is_one(mesh, folder):
    whole = torch.arange(6.0, requires_grad=True)
    for source, target in [(Shard(0), Replicate()), (Partial(), Shard(0)), (Replicate(), Shard(0))]:
        leaf = vd.distribute_tensor(whole.detach().clone().requires_grad_(), mesh, [source])
        moved = leaf.redistribute(placements=[target], async_op=True)
        assert moved.placements == (target,)
        torch.testing.assert_close(moved.full_tensor(), whole)
        (moved * 2).sum().backward()
        assert leaf.grad.full_tensor().tolist() == [2.0] * 6


@case
def meta_tensors_are_distributed_without_communication(mesh, folder):
    ranks = mesh.size()
    with trace() as traced:
        for placement in (Shard(0), Shard(1), Replicate(), Partial()):
            made = vd.distribute_tensor(torch.empty(5, 4, device="meta"), mesh, [placement])
            real = vd.distribute_tensor(torch.empty(5, 4), mesh, [placement], src_data_rank=None)
            assert made.is_meta
            assert made.device.type == "meta"
            assert made.placements == (placement,)
            assert made.to_local().shape == real.to_local().shape
            assert (made @ made.T).shape == (5, 5)
            assert made.redistribute(placements=[Replicate()]).to_local().shape == (5, 4)
    assert traced.counts() == {}
    with torch.device("meta"):
        model, layer = MLP(), nn.BatchNorm1d(4)
    assert vd.distribute_module(layer, mesh).running_mean.is_meta
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert model.up.weight.is_meta
    assert model.up.weight.placements == (Shard(0),)
    model.to_empty(device="cpu")
    assert model.up.weight.to_local().shape[0] <= -(-6 // ranks)
    assert not model.up.weight.is_meta
    torch.manual_seed(0)
    for linear in (model.up, model.down):
        linear.reset_parameters()
    torch.manual_seed(0)
    reference = MLP()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q), name
    torch.testing.assert_close(model(torch.ones(2, 4)), reference(torch.ones(2, 4)))


@case
def new_tensors_of_the_same_shape_lie_as_their_tensor(mesh, folder):
    x = vd.distribute_tensor(torch.arange(12.0).reshape(4, 3).T, mesh, [Shard(0)])
    plain = torch.arange(12.0).reshape(4, 3).T
    calls = {
        "zeros": lambda t: t.new_zeros(3, 4),
        "ones": lambda t: t.new_ones((3, 4), dtype=torch.int32),
        "full": lambda t: t.new_full((3, 4), 2.5),
        "full by name": lambda t: t.new_full(size=(3, 4), fill_value=7, dtype=torch.float64),
        "size": lambda t: t.new_ones(t.shape, requires_grad=True),
        "by name": lambda t: t.new_zeros(size=t.size()),
    }
    with trace() as traced:
        for name, call in calls.items():
            made, expected = call(x), call(plain)
            assert made.placements == (Shard(0),), name
            assert made.stride() == expected.stride(), name
            assert made.dtype == expected.dtype, name
            assert made.requires_grad == expected.requires_grad, name
        assert x.new_empty(3, 4).placements == (Shard(0),)
    assert traced.counts() == {}
    for name, call in calls.items():
        assert torch.equal(call(x).full_tensor(), call(plain)), name
    assert x.new_zeros(4, 3).placements == (Replicate(),)
    assert x.new_tensor([[1.0] * 4] * 3).placements == (Replicate(),)
    partial = vd.DTensor.from_local(torch.ones(2), mesh, [Partial()])
    assert partial.new_ones(2).placements == (Replicate(),)
    assert torch.is_same_size(x, plain)
    assert not x.is_same_size(plain.T)
    with pytest.raises(TypeError):
        x.new_full(3, 4)


DIRECT = {
    "mm": lambda x, y: aten.mm(x, y),
    "mm.default": lambda x, y: aten.mm.default(x, y),
    "by name": lambda x, y: aten.mm.default(self=x, mat2=y),
    "add": lambda x, y: aten.add.Tensor(x, x, alpha=2),
    "scalar": lambda x, y: aten.mul.Scalar(x, 3.0),
    "sum": lambda x, y: aten.sum.dim_IntList(x, [0], True),
    "mean": lambda x, y: aten.mean.dim(x, [1]),
    "max": lambda x, y: tuple(aten.max.dim(x, 1)),
    "view": lambda x, y: aten.view.default(x, [4, 3, 2]),
    "transpose": lambda x, y: aten.transpose.int(x, 0, 1),
    "unbind": lambda x, y: aten.unbind.int(x, 1),
    "relu_": lambda x, y: aten.relu_.default(x.clone()),
    "add_": lambda x, y: aten.add_.Tensor(x.clone(), x),
    "gelu": lambda x, y: aten.gelu.default(x, approximate="tanh"),
    "linear": lambda x, y: aten.linear.default(x, y.T),
    "addmm": lambda x, y: aten.addmm.default(y[0], x, y),
    "embedding": lambda x, y: aten.embedding.default(x, torch.tensor([1, 0, 3])),
    "cat": lambda x, y: aten.cat.default([x, x], 1),
    "where": lambda x, y: aten.where.self(x > 0, x, x * 2),
    "clone": lambda x, y: aten.clone.default(x),
    "norm": lambda x, y: aten.native_layer_norm(x, [6], None, None, 1e-5)[0],
    "select": lambda x, y: aten.select.int(x, 1, 2),
}


@case
def operators_take_the_rules_of_their_functions(mesh, folder):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 6, generator=generator), torch.randn(6, 5, generator=generator)
    for placement in (Shard(0), Shard(1), Replicate()):
        for name, call in DIRECT.items():
            given = [vd.distribute_tensor(t, mesh, [p], src_data_rank=None)
                     for t, p in ((x, placement), (y, Replicate()))]  # fmt: skip
            with vd.explain() as report:
                found = call(*given)
            expected = call(x, y)
            assert type(found) is type(expected) or isinstance(found, vd.DTensor), name
            several = [found] if isinstance(found, vd.DTensor) else found
            plain = [expected] if isinstance(expected, torch.Tensor) else expected
            for one, other in zip(several, plain, strict=True):
                torch.testing.assert_close(one.full_tensor(), other, msg=name)
            if (name, placement) not in {("embedding", Shard(0)), ("norm", Shard(1))}:
                assert not report.fallbacks, (name, placement)


def program(rank, world_size, name, folder):
    CASES[name](vd.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)), folder)


@pytest.mark.parametrize("name", CASES)
def test_moved_scripts(name, tmp_path):
    simulate(2)(program, name, tmp_path)


def test_a_picture_is_printed_once(capsys):
    def program(rank, world_size):
        mesh = vd.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
        visualize_sharding(vd.zeros(4, device_mesh=mesh, placements=[Shard(0)]), header="weight")
        visualize_sharding(vd.zeros(0, device_mesh=mesh))

    simulate(2)(program)
    printed = capsys.readouterr().out
    assert printed.count("weight") == 1
    assert printed.count("tp: Shard(0)") == 1


@on_ranks(3, simulated=True)
def test_ranks_outside_of_a_mesh_hold_nothing(rank, world_size):
    mesh = vd.DeviceMesh("cpu", [0, 2], mesh_dim_names=("tp",))
    inside = rank in (0, 2)
    torch.manual_seed(0)
    made = {
        "distributed": vd.distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]),
        "leaf": vd.distribute_tensor(torch.ones(5, requires_grad=True), mesh, [Shard(0)]),
        "zeros": vd.zeros(5, device_mesh=mesh, placements=[Shard(0)]),
        "partial": vd.ones(5, device_mesh=mesh, placements=[Partial()]),
        "range": vd.arange(5, device_mesh=mesh, placements=[Shard(0)]),
        "drawn": vd.randn(5, device_mesh=mesh, placements=[Shard(0)]),
        "local": vd.DTensor.from_local(torch.ones(3 - rank // 2), mesh, [Shard(0)], shape=(5,)),
    }
    for name, x in made.items():
        assert x.shape == (5,), name
        assert x.placements in ((Shard(0),), (Partial(),))
        assert x.requires_grad == (name == "leaf")
        assert inside == (x.to_local().numel() > 0), name
        if not inside:
            assert x.to_local().shape == (0,), name
            assert x.redistribute(placements=[Replicate()]).placements == (Replicate(),)
            assert x.full_tensor().shape == (0,)
            assert "f32[5" in repr(x) or name == "range"
            for call in (lambda y: y + 1, lambda y: y @ y, lambda y: y.sum(), torch.relu):
                with pytest.raises(MeshError, match=r"this rank is not part of mesh\(tp=2\)"):
                    call(x)
            assert torch.zeros_like(x).shape == (5,)
        else:
            assert x.full_tensor().shape == (5,)
            assert (x + 1).sum().full_tensor().shape == ()
    # One device's generator: those outside have drawn as much.
    after = torch.rand(2)
    torch.manual_seed(0)
    torch.randn(5)
    assert torch.equal(after, torch.rand(2))
    model = vd.distribute_module(nn.Linear(2, 2), mesh)
    assert (model.weight.to_local().numel() == 0) == (not inside)
