"""Real processes: torch's DTensors of 4 ranks load on 4, 3, 2 and 1; all ranks hear of errors."""

import pytest
import torch
import torch.distributed as dist
import vescale_ckpt as ckpt
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from vescale_ckpt._coordination import groups

testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")

SEED_SHAPES = {"even": (8, 12), "uneven": (7, 5), "few": (3, 2), "large": (300, 400)}


def meshes(world_size):
    return {4: [(4, 1), (2, 2), (1, 4)], 3: [(3, 1)], 2: [(2, 1), (1, 2)], 1: [(1, 1)]}[world_size]


def wholes():
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(shape, generator=generator) for n, shape in SEED_SHAPES.items()}


def distributed_state(mesh_shape, *, zero=False):
    """Every tensor in every pair of placements, as parameters of torch's own DTensor."""
    mesh = testing.device_mesh(mesh_shape, ("a", "b"))
    kinds = [Shard(0), Shard(1), Replicate()]
    state = {}
    for name, whole in wholes().items():
        for first in kinds:
            for second in kinds:
                tensor = distribute_tensor(whole, mesh, [first, second], src_data_rank=None)
                assert isinstance(tensor, DTensor)
                if zero:
                    tensor = torch.zeros_like(tensor)
                state[f"{name} {first}{second}"] = torch.nn.Parameter(tensor)
    return state


def expected_local(whole, parameter):
    """This rank's part of `whole`, by torch's own code."""
    like = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return like.to_local()


def save_dtensors(rank, world_size, path, mesh_shape):
    ckpt.save(path, {"w": distributed_state(mesh_shape), "rank": ckpt.RankLocal(rank), "n": 3})


def load_dtensors(rank, world_size, path, mesh_shape):
    state = distributed_state(mesh_shape, zero=True)
    keep_all = ckpt.RankLocal(None, reshard=lambda values, rank, size: values)
    loaded = ckpt.load(path, {"w": state, "rank": keep_all})
    for name, parameter in state.items():
        local = expected_local(wholes()[name.split()[0]], parameter)
        assert parameter.to_local().equal(local), name
        assert parameter.requires_grad
    return loaded["rank"].value


@pytest.mark.parametrize("saved_on", meshes(4), ids=str)
def test_dtensors_from_4_ranks_to_any(path, saved_on):
    testing.run(save_dtensors, 4, path, saved_on)
    for name, tensor in ckpt.read(path)["w"].items():
        assert tensor.equal(wholes()[name.split()[0]]), name
    for world_size in (4, 3, 2, 1):
        for mesh_shape in meshes(world_size):
            found = testing.run(load_dtensors, world_size, path, mesh_shape)
            expected = list(range(4))
            assert found == (expected if world_size == 4 else [expected] * world_size)


def save_strided(rank, world_size, path):
    mesh = testing.device_mesh((2, 2), ("dp", "tp"))
    whole = wholes()["even"]
    # As FSDP2 over TP lays a parameter out: rank (i, j) holds part i of half j.
    a, b = divmod(rank, 2)
    local = whole.chunk(2, 0)[b].chunk(2, 0)[a].contiguous()
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    tensor = DTensor.from_local(
        local, mesh, placements, shape=whole.shape, stride=whole.stride(), run_check=False
    )
    ckpt.save(path, {"w": tensor})


def test_the_layout_of_fsdp2_over_tp(path):
    testing.run(save_strided, 4, path)
    assert ckpt.read(path)["w"].equal(wholes()["even"])


def save_partial(rank, world_size, path):
    mesh = testing.device_mesh((2,), ("dp",))
    ckpt.save(path, {"grad": DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)})


def test_a_pending_sum_is_refused(path):
    for outcome in testing.outcomes(save_partial, 2, path):
        assert outcome.type_name.endswith("StateError")
        assert "at 'grad'" in outcome.message
        assert "redistribute it" in outcome.message


def save_something(rank, world_size, path, bad_rank):
    ckpt.save(path, {"w": object() if rank == bad_rank else torch.zeros(2)})


def load_something(rank, world_size, path):
    ckpt.load(path, {"w": torch.zeros(2 if rank else 3)})


def test_every_rank_raises_the_same(path, tmp_path):
    outcomes = testing.outcomes(save_something, 3, path, 1)
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "rank 1 of 3: at 'w': a builtins.object cannot be saved" in outcomes[0].message
    assert list(tmp_path.iterdir()) == []
    testing.run(save_something, 3, path, None)
    outcomes = testing.outcomes(load_something, 2, path)
    assert {outcome.type_name.rpartition(".")[2] for outcome in outcomes} == {"MismatchError"}
    assert len({outcome.message for outcome in outcomes}) == 1


def save_in_groups(rank, world_size, path):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = rank % 2
    ckpt.save(f"{path}-{mine}", {"n": mine, "w": torch.full((4,), mine)}, group=groups[mine])
    loaded = ckpt.load(
        f"{path}-{mine}", {"w": torch.zeros(4, dtype=torch.int64)}, group=groups[mine]
    )
    manager = ckpt.CheckpointManager(f"{path}-run-{mine}", keep_last=1, group=groups[mine])
    for step in (1, 2):
        manager.save(step, {"n": step})
    assert manager.restore(into={"n": 0}) == {"n": 2}
    return loaded["n"], manager.steps()


def test_groups(path):
    assert testing.run(save_in_groups, 4, path) == [(0, [2]), (1, [2]), (0, [2]), (1, [2])]


def train_with_optimizer(rank, world_size, path, mesh_shape, steps):
    """FSDP-like: sharded parameters, AdamW on them; returns the full parameters afterwards."""
    mesh = testing.device_mesh(mesh_shape, ("dp",))
    whole = torch.arange(35.0).reshape(7, 5)
    weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    ckpt.init_optimizer_state(optimizer)
    into = {"w": weight, "optim": optimizer.state_dict()}
    try:
        optimizer.load_state_dict(ckpt.load(path, into)["optim"])
    except ckpt.NotFoundError:
        optimizer.state.clear()
    for _ in range(steps):
        weight.grad = weight.detach() * 0.5 + 1
        optimizer.step()
    ckpt.save(path, {"w": weight, "optim": optimizer.state_dict()}, overwrite=True)
    return int(optimizer.state[weight]["step"])


def test_sharded_optimizer_state_follows_to_other_worlds(path):
    assert testing.run(train_with_optimizer, 1, f"{path}-1", (1,), 6) == [6]
    assert testing.run(train_with_optimizer, 4, f"{path}-n", (4,), 2) == [2] * 4
    assert testing.run(train_with_optimizer, 3, f"{path}-n", (3,), 2) == [4] * 3
    assert testing.run(train_with_optimizer, 2, f"{path}-n", (2,), 2) == [6] * 2
    one, many = ckpt.read(f"{path}-1"), ckpt.read(f"{path}-n")
    assert one["w"].equal(many["w"])
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert one["optim"]["state"][0][key].equal(many["optim"]["state"][0][key])


DEVICES = [
    ("cpu:gloo,cuda:gloo", "cpu"),
    ("cpu:gloo,cuda:nccl", "cpu"),
    ("cuda:nccl", "cuda"),
    ("xpu:xccl", "xpu"),
]


@pytest.mark.parametrize(("config", "expected"), DEVICES)
def test_messages_are_sent_from_the_host_where_a_backend_can(monkeypatch, config, expected):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert groups._message_device(None).type == expected
