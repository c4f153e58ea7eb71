"""What others save of a distributed model is what one device saves, or each rank's part, as was
said; what is loaded trains on as if it had never been saved.
"""

import copy
import io
import pickle  # noqa: TID251 - the very thing that is tested

import pytest
import torch
import torch.distributed.checkpoint as dcp
import vescale_dtensor as vd
from named_cases import named_cases
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions
from vescale_comm import simulate
from vescale_comm.testing import run
from vescale_dtensor import LayoutError, Replicate, Shard, UnsupportedError, state_dict
from vescale_dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

CASES, case = named_cases()
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def plain_model(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))


def distributed_model(mesh, seed=0):
    return parallelize_module(plain_model(seed), mesh, PLAN)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, steps=2):
    for step in range(steps):
        x = torch.linspace(-1, 1, 12).reshape(3, 4) * (step + 1)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(found, expected):
    """Nested states with equal keys and values; every tensor is plain."""
    if isinstance(expected, torch.Tensor):
        assert type(found) in (torch.Tensor, nn.Parameter)
        torch.testing.assert_close(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == expected


def reread(thing, part, **options):
    with state_dict.pickled(part):
        torch.save(thing, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, **options)  # noqa: TID251


@case
def a_pickle_says_what_it_holds(mesh, folder):
    model = distributed_model(mesh)
    for save in (pickle.dumps, lambda x: torch.save(x, io.BytesIO())):
        with pytest.raises(UnsupportedError, match=r'with pickled\("whole"\).*full_state_dict'):
            save(model[0].weight)
    with pytest.raises(ValueError, match="'whole' or 'local'"), state_dict.pickled("all"):
        pass
    assert isinstance(copy.deepcopy(model[0].weight), vd.DTensor)  # which needs no word


@case
def whole_pickles_are_those_of_one_device(mesh, folder):
    model, plain = distributed_model(mesh), plain_model()
    same(reread(model.state_dict(), "whole"), plain.state_dict())
    parameter = reread(model[0].weight, "whole", weights_only=True)
    assert type(parameter) is nn.Parameter
    assert parameter.requires_grad
    tensor = vd.distribute_tensor(torch.arange(6.0).reshape(2, 3).T, mesh, [Shard(0)])
    found = reread({"a": tensor, "b": [tensor, 3]}, "whole")
    assert found["a"] is found["b"][0]
    assert torch.equal(found["a"], torch.arange(6.0).reshape(2, 3).T)
    assert not found["a"].requires_grad
    partial = vd.DTensor.from_local(torch.ones(2), mesh, [vd.Partial()])
    assert reread(partial, "whole").tolist() == [2.0, 2.0]
    # A whole module: its hooks are closures over the mesh, so it is one without styles.
    layer = vd.distribute_module(nn.Linear(3, 2), mesh)
    found = reread(layer, "whole", weights_only=False)
    same(dict(found.state_dict()), state_dict.full_state_dict(layer))


@case
def local_pickles_are_read_where_they_were_written(mesh, folder):
    model = distributed_model(mesh)
    optimizer = optimizer_of(model)
    train(model, optimizer)
    other = distributed_model(mesh, seed=1)
    twin = optimizer_of(other)
    with state_dict.unpickled_on(mesh):
        model_state = reread(model.state_dict(), "local", weights_only=True)
        state = reread(optimizer.state_dict(), "local", weights_only=True)
    assert model_state["0.weight"].placements == (Shard(0),)
    other.load_state_dict(model_state)
    twin.load_state_dict(state)
    for each in ((model, optimizer), (other, twin)):
        train(*each)
    same(state_dict.full_state_dict(other), state_dict.full_state_dict(model))
    tensor = vd.distribute_tensor(torch.arange(6.0).reshape(2, 3).T, mesh, [Shard(0)])
    tensor.requires_grad_()
    with mesh:
        found = reread(tensor, "local", weights_only=False)
    assert found.stride() == tensor.stride()
    assert found.requires_grad
    assert torch.equal(found.full_tensor(), tensor.full_tensor())
    with state_dict.unpickled_on(mesh):
        parameter = reread(model[0].weight, "local")
    assert isinstance(parameter, nn.Parameter)
    with pytest.raises(vd.MeshError, match="no `with mesh:` is open"):
        reread(tensor, "local", weights_only=False)
    renamed = vd.init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("dp",))
    elsewhere = pytest.raises(vd.MeshError, match=r"on mesh\(dp=2\) .* what lay on mesh\(tp=2\)")
    with elsewhere, state_dict.unpickled_on(renamed):
        reread(tensor, "local")


@case
def a_slice_is_pickled_without_what_is_around_it(mesh, folder):
    wide = vd.distribute_tensor(torch.zeros(1000, 100), mesh, [Shard(0)])
    sizes = []
    for thing in (wide[:2], wide):
        with state_dict.pickled("local"):
            torch.save(thing, file := io.BytesIO())
        sizes.append(file.tell())
    assert sizes[0] < 10_000 < sizes[1]


@case
def a_full_state_dict_is_that_of_one_device(mesh, folder):
    model, plain = distributed_model(mesh), plain_model()
    same(state_dict.full_state_dict(model), dict(plain.state_dict()))
    found = state_dict.full_state_dict(model, rank0_only=True, cpu_offload=True)
    same(found, dict(plain.state_dict()) if mesh.get_local_rank() == 0 else {})
    options = StateDictOptions(full_state_dict=True)
    same(state_dict.get_model_state_dict(model, options=options), dict(plain.state_dict()))
    assert isinstance(state_dict.get_model_state_dict(model)["0.weight"], vd.DTensor)
    offloaded = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = state_dict.get_model_state_dict(model, options=offloaded)
    assert len(found) == (4 if mesh.get_local_rank() == 0 else 0)
    with pytest.raises(UnsupportedError, match="full_state_dict=True"):
        state_dict.get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))


@case
def states_of_optimizers_move_between_one_device_and_a_mesh(mesh, folder):
    full = StateDictOptions(full_state_dict=True)
    model, plain = distributed_model(mesh), plain_model()
    optimizer, reference = optimizer_of(model), optimizer_of(plain)
    train(model, optimizer)
    train(plain, reference)
    state = state_dict.get_optimizer_state_dict(model, optimizer, options=full)
    expected = dcp.state_dict.get_optimizer_state_dict(plain, reference)
    same(state, expected)
    # One device's state goes on over the mesh.
    other = distributed_model(mesh, seed=1)
    twin = optimizer_of(other)
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    missing = state_dict.set_state_dict(
        other, twin, model_state_dict=weights, optim_state_dict=copy.deepcopy(expected),
        options=full,
    )  # fmt: skip
    assert not any(missing)
    averages = [s["exp_avg"] for s in twin.state.values()]
    assert [a.placements for a in averages] == [p.placements for p in other.parameters()]
    # The mesh's own, sharded, too.
    third = distributed_model(mesh, seed=2)
    last = optimizer_of(third)
    model_state, state = state_dict.get_state_dict(model, optimizer)
    state_dict.set_model_state_dict(third, model_state)
    state_dict.set_optimizer_state_dict(third, last, state)
    for each in ((plain, reference), (other, twin), (third, last)):
        train(*each)
    same(state_dict.full_state_dict(other), dict(plain.state_dict()))
    same(state_dict.full_state_dict(third), dict(plain.state_dict()))
    options = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True)
    with pytest.raises(UnsupportedError, match="on every rank"):
        state_dict.set_optimizer_state_dict(third, last, state, options=options)


@case
def the_first_rank_alone_may_have_the_state(mesh, folder):
    model, plain = distributed_model(mesh), plain_model(seed=1)
    state = dict(plain.state_dict()) if mesh.get_local_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state_dict.set_model_state_dict(model, state, options=options)
    same(state_dict.full_state_dict(model), dict(plain.state_dict()))
    with pytest.raises(UnsupportedError, match="no DTensor"):
        state_dict.set_model_state_dict(plain, state, options=options)


@case
def what_the_first_rank_lacks_is_told_on_every_rank(mesh, folder):
    model, plain = distributed_model(mesh), plain_model(seed=1)
    before = {name: one.clone() for name, one in state_dict.full_state_dict(model).items()}
    (name, other, *_) = plain.state_dict()
    first = mesh.get_local_rank() == 0
    state = {k: v for k, v in plain.state_dict().items() if k != name} if first else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
        state_dict.set_model_state_dict(model, state, options=options)
    loose = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    state_dict.set_model_state_dict(model, state, options=loose)
    same(state_dict.full_state_dict(model), {**dict(plain.state_dict()), name: before[name]})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*extra"):
        state_dict.set_model_state_dict(
            model, {**plain.state_dict(), "extra": torch.ones(2)} if first else {}, options=options
        )
    with pytest.raises(LayoutError, match=f"{other}.* on the first rank"):
        state_dict.set_model_state_dict(
            model, {**state, other: torch.ones(1)} if first else {}, options=loose
        )


@case
def torch_checkpoints_load_into_the_same_memory(mesh, folder):
    model = distributed_model(mesh)
    optimizer = optimizer_of(model)
    train(model, optimizer)
    state = {"model": model.state_dict(), "step": 3}
    state["optimizer"] = state_dict.get_optimizer_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=folder)
    other = distributed_model(mesh, seed=1)
    twin = optimizer_of(other)
    found = {
        "model": other,
        "step": 0,
        "optimizer": state_dict.get_optimizer_state_dict(other, twin),
    }
    dcp.load(found, checkpoint_id=folder)
    assert found["step"] == 3
    same(state_dict.full_state_dict(other), state_dict.full_state_dict(model))
    state_dict.set_optimizer_state_dict(other, twin, found["optimizer"])
    for one, trained in ((other, twin), (model, optimizer)):
        train(one, trained, steps=1)
    same(state_dict.full_state_dict(other), state_dict.full_state_dict(model))
    # In another layout, which torch's checkpoint reshards; and through torch's own tensors.
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    for wrapped in (dict, state_dict.as_torch):
        rows = vd.distribute_module(plain_model(seed=2), mesh)
        dcp.load(wrapped({"model": rows.state_dict()}), checkpoint_id=folder)
        same(state_dict.full_state_dict(rows), state_dict.full_state_dict(model))
    assert rows[0].weight.placements == (Replicate(),)


LAYOUTS = {
    "rows": ((7, 4), Shard(0)),
    "interleaved": ((4, 8), vd.InterleavedShard(1, 2)),
    "ragged": ((5, 3), vd.RaggedShard((0, 1), (4, 11))),
    "all on one": ((3, 2), vd.RaggedShard((0,), (0, 1))),
    "alike": ((3,), Replicate()),
    "a number": ((), Replicate()),
    "nothing": ((0, 4), Shard(1)),
}


def state_of(mesh, layouts, fill=None):
    def made(shape):
        values = torch.arange(float(torch.Size(shape).numel())).view(shape)
        return values if fill is None else torch.full_like(values, fill)

    return {
        name: vd.distribute_tensor(made(shape), mesh, [layouts.get(name, placement)])
        for name, (shape, placement) in LAYOUTS.items()
    }


@case
def torch_checkpoints_hold_every_layout(mesh, folder):
    state = state_of(mesh, {})
    # Column-major in the memory of one device, and of another storage than its own.
    state["turned"] = state["rows"].T
    dcp.save(state, checkpoint_id=folder)
    wanted = {name: one.full_tensor() for name, one in state.items()}
    elsewhere = {name: Shard(len(shape) - 1) for name, (shape, _) in LAYOUTS.items() if shape}
    for layouts in ({}, elsewhere, {name: Replicate() for name in LAYOUTS}):
        found = state_of(mesh, layouts, fill=-1.0)
        found["turned"] = vd.zeros(4, 7, device_mesh=mesh, placements=[Shard(1)])
        # What was gathered before is not what is gathered once the file was read.
        assert (found["rows"].full_tensor() == -1).all()
        dcp.load(found, checkpoint_id=folder)
        same({name: one.full_tensor() for name, one in found.items()}, wanted)


@case
def torch_checkpoints_refuse_what_is_not_there(mesh, folder):
    partial = vd.DTensor.from_local(torch.ones(2), mesh, [vd.Partial()])
    with pytest.raises(LayoutError, match="is partial"):
        state_dict.as_torch({"x": partial})
    with pytest.raises(CheckpointException, match=r"saving x: .* is partial.*redistribute it"):
        dcp.save({"x": partial}, checkpoint_id=folder)
    rows = vd.zeros(4, 2, device_mesh=mesh, placements=[Shard(0)])
    with pytest.raises(LayoutError, match=r"x: this rank holds no box .* begins at .*\[1, 0\]"):
        rows.__get_tensor_shard__(MetadataIndex("x", torch.Size([1, 0])))
    with pytest.raises(UnsupportedError, match=r"async_save takes .*as_torch\(state\)"):
        dcp.async_save({"x": rows}, checkpoint_id=folder)


def program(rank, world_size, name, folder):
    CASES[name](vd.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)), folder)


# torch's checkpoint keeps a planner and threads of its own for the process.
REAL = [name for name in CASES if name.startswith("torch_checkpoints")]
SIMULATED = [name for name in CASES if name not in REAL]


@pytest.mark.parametrize("name", [*REAL, "states_of_optimizers_move_between_one_device_and_a_mesh"])
def test_in_real_processes(name, tmp_path):
    run(program, 2, name, tmp_path / "checkpoint")


@pytest.mark.parametrize("name", SIMULATED)
def test_in_simulation(name, tmp_path):
    simulate(2)(program, name, tmp_path / "checkpoint")
