"""Process groups that are destroyed and made again, with other ranks or fewer, are other ones, for
all that keeps a group, a store, a counter or a cache by group."""

import gc

import pytest
import torch
import torch.distributed as dist
import vescale_comm as vc
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from vescale_comm import agreement, graphs
from vescale_comm.testing import run
from vescale_comm_worlds import POOLS


def groups_of(size):
    """A group of every kind, each of all ranks, and the order of these."""
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp"))
    line = DeviceMesh("cpu", torch.arange(size).flip(0).view(1, size), mesh_dim_names=("x", "y"))
    up, down = range(size), range(size - 1, -1, -1)
    found = [(vc.as_group(), up), (vc.as_group(dist.new_group()), up)]
    for one, axes, ranks in ((mesh, "dp", up), (mesh, ("dp", "tp"), up), (line, ("x", "y"), down)):
        found += [(vc.group_of(one, axes, lane=lane), ranks) for lane in (0, 1)]
    return [mesh, line], found


def check_group(group, ranks):
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.tensor([rank + 1.0])
    assert group.ranks == tuple(ranks)
    assert group.ranks[group.rank] == rank
    total = size * (size + 1) / 2
    everyone = [one + 1.0 for one in ranks]
    for _ in range(2):  # the second by what is known from the first
        assert vc.all_reduce(own, group).item() == total
        assert vc.all_gather(own, group).tolist() == everyone
        assert vc.reduce_scatter(own.expand(size).clone(), group, order="rank").item() == total
    assert vc.broadcast(own, group).item() == everyone[0]
    if size > 1:
        started = graphs.start_all_reduce(own, "sum", group.tag)
        assert graphs.finish(started).item() == total
        at = group.rank
        sent = vc.send(own, group, target=(at + 1) % size, async_op=True)
        assert vc.recv(own, group, source=at - 1 if at else size - 1).item() == everyone[at - 1]
        sent.wait()
    assert agreement.gather_numbers([rank], group) == [(one,) for one in ranks]
    assert agreement.gather_texts(f"{rank}", group) == [f"{one}" for one in ranks]


def check_world(rank, size):
    """Use all that keeps a group; return it."""
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    meshes, groups = groups_of(size)
    for group, ranks in groups:
        check_group(group, ranks)
    vc.bound_waits(timeout=POOLS)
    with vc.checked(timeout=60):
        check_group(*groups[-1])
    assert agreement.broadcast_text(f"{rank}", size - 1) == f"{size - 1}"
    log = vc.execution_log(tuple(range(size)))
    assert log is None or log.all_say("made")
    alone = vc.group_alone()
    assert alone.ranks == (rank,)
    bucket = vc.Bucket.plan([(2,), (3,)], [torch.float32] * 2)
    reducer = vc.Reducer(bucket)
    for _ in range(2):
        for member, shape in enumerate(bucket.shapes):
            reducer.put(member, torch.full(shape, rank + 1.0))
        assert {x.item() for part in reducer.wait() for x in part} == {size * (size + 1) / 2}
    assert vc.unwaited() == []
    return meshes, [*(group for group, _ in groups), alone], reducer


def enter(server, number, rank, size):
    store = dist.PrefixStore(f"again{number}", server)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def in_several_worlds(rank, size):
    server = dist.distributed_c10d._get_default_store()  # of the workers, and outlives these worlds
    kept = [check_world(rank, size)]
    dist.destroy_process_group()
    for number, (own, members) in enumerate([(2 - rank, 3), (1 - rank, 2), (rank, 1)]):
        if rank >= members:
            break
        enter(server, number, own, members)
        kept.append(check_world(own, members))
        # Of a world that is gone, what is used is refused in words.
        for _, groups, _ in kept[:-1]:
            for group in groups:
                with pytest.raises(vc.CommError, match="its process group was destroyed"):
                    group.process_group  # noqa: B018 (what every function asks for)
        dist.destroy_process_group()
    return len(kept)


def test_worlds_with_other_ranks_or_fewer():
    assert run(in_several_worlds, 3, timeout=30) == [4, 3, 2]


def again_in_one_world(rank, size):
    vc.bound_waits(timeout=20)
    mesh, names = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp")), set()
    order = torch.arange(size).flip(0).view(1, size)
    flat = DeviceMesh("cpu", order, mesh_dim_names=("x", "y"))
    before = len(dist.distributed_c10d._world.pg_names)
    with vc.trace() as sent:
        for _ in range(3):
            lane = vc.group_of(mesh["dp"], "dp", lane=1)
            for _ in range(3):  # a slice of a mesh dies, and what was made for it is there
                gc.collect()
                assert vc.group_of(mesh["dp"], "dp", lane=1).process_group is lane.process_group
            with vc.checked(timeout=20):
                assert vc.all_reduce(torch.ones(2), lane).tolist() == [size] * 2
                x = torch.ones(2)
                assert vc.all_reduce_(x, lane).tolist() == [size] * 2
            whole = vc.group_of(flat, ("x", "y"), lane=2)
            assert vc.all_gather(torch.tensor([rank]), whole).tolist() == order.view(-1).tolist()
            for group in (lane, whole):
                # torch would find under a name that was given before what the first one has left.
                assert group.tag not in names
                names.add(group.tag)
                dist.destroy_process_group(group.process_group)
            mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp"))
            flat = DeviceMesh("cpu", order, mesh_dim_names=("x", "y"))
    vc.bound_waits(timeout=POOLS)
    return len(dist.distributed_c10d._world.pg_names) - before, sent.counts(), sent.unrecorded


def test_groups_of_one_world():
    found = run(again_in_one_world, 2, timeout=30)
    assert found[0] == found[1]
    assert found[0][1:] == ({"all_reduce": 6, "all_gather": 3}, {})
