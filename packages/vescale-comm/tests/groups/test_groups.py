"""A group has the right members in the order of the mesh, is made once, and does not outlive it."""

import gc
import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
import vescale_comm as vc
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from vescale_comm.testing import device_mesh, on_ranks, outcomes, run
from vescale_comm_worlds import refusals

NAMES = ("dp", "cp", "tp")


def members_of(grid, dims, rank):
    """The ranks that differ from `rank` along `dims` only, row-major over them: by definition."""
    at = (grid == rank).nonzero()[0].tolist()
    ranges = [range(grid.shape[d]) if d in dims else [at[d]] for d in range(grid.ndim)]
    return tuple(int(grid[index]) for index in itertools.product(*ranges))


def check_every_subset(rank, world_size, shape, order):
    grid = torch.tensor(order).view(shape)
    names = NAMES[: len(shape)]
    mesh = DeviceMesh("cpu", grid, mesh_dim_names=names)
    for count in range(1, len(shape) + 1):
        for dims in itertools.combinations(range(len(shape)), count):
            group = vc.group_of(mesh, tuple(names[d] for d in dims))
            expected = members_of(grid, dims, rank)
            assert group.ranks == expected
            assert group.size == len(expected)
            assert group.rank == expected.index(rank)
            assert group.axes == tuple(names[d] for d in dims)
            # What the members say, and in which order, is the mesh's business and not torch's.
            mine = torch.tensor([float(rank)])
            assert vc.all_gather(mine, group).tolist() == list(map(float, expected))
            uneven = vc.all_gather(
                mine.expand(group.rank + 1), group, sizes=range(1, group.size + 1)
            )
            assert uneven.tolist() == [m for i, m in enumerate(expected) for _ in range(i + 1)]
            assert vc.all_reduce(mine, group).item() == sum(expected)
            assert vc.broadcast(mine, group, source=group.size - 1).item() == expected[-1]
            table = torch.arange(float(group.size))
            assert vc.reduce_scatter(table, group).item() == group.rank * group.size


ORDERS = [
    ((2, 2), [0, 1, 2, 3]),
    ((2, 2), [3, 1, 0, 2]),
    ((4, 1), [0, 1, 2, 3]),
    ((1, 2, 2), [0, 2, 1, 3]),
    ((2, 2, 2), [0, 1, 2, 3, 4, 5, 6, 7]),
    ((2, 2, 2), [7, 0, 6, 1, 5, 2, 4, 3]),
    ((2, 4), [1, 0, 3, 2, 5, 4, 7, 6]),
]


@pytest.mark.parametrize(("shape", "order"), ORDERS, ids=str)
def test_members_are_those_of_the_mesh_in_its_order(shape, order):
    run(check_every_subset, len(order), shape, order)


@on_ranks(4)
def test_members_are_in_order_where_torch_always_sorts_them(rank, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vescale_comm._groups.new_group.can_order_ranks", lambda: False)
        check_every_subset(rank, world_size, (2, 2), [3, 1, 0, 2])


def refused(rank, world_size):
    grid = torch.tensor([[2, 0], [3, 1]])  # in no other test: groups are kept
    mesh = DeviceMesh("cpu", grid, mesh_dim_names=("dp", "tp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vescale_comm._groups.new_group.can_order_ranks", lambda: False)
        # A torch that sorts by something else than the members themselves.
        patch.setattr("vescale_comm._groups.new_group._Member", lambda rank, place: rank)
        vc.group_of(mesh, ("dp", "tp"))


def test_a_group_whose_members_torch_has_put_in_another_order_is_no_group():
    for outcome in outcomes(refused, 4):
        assert "where one in the order [2, 0, 3, 1] was asked for" in outcome.message


def names_and_indices(rank, world_size):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    both = vc.group_of(mesh, ("dp", "tp"))
    return [
        vc.group_of(mesh, "tp").ranks == vc.group_of(mesh, 1).ranks == vc.group_of(mesh, -1).ranks,
        vc.group_of(mesh, ("tp", "dp")) is vc.group_of(mesh, (-1, 0)) is both,
        vc.group_of(mesh, ["dp"]).process_group is mesh.get_group("dp"),
        both.process_group is dist.group.WORLD and both.axes == ("dp", "tp"),
        vc.group_of(mesh, ("dp", "tp")) is both,
        vc.as_group(mesh.get_group("tp")).ranks == vc.group_of(mesh, "tp").ranks,
        vc.as_group().ranks == tuple(range(world_size)),
        vc.as_group(both) is both,
    ]


def test_axes_by_name_or_index_and_existing_process_groups_are_used():
    assert run(names_and_indices, 4) == [[True] * 8] * 4


def groups_made(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
    again = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=NAMES)
    flat = vc.group_of(mesh, ("dp", "tp"))
    before = dist.get_pg_count()
    # Another mesh of the same ranks, such as a slice made again, needs no other process group.
    for same in (mesh, again):
        for axes in (("dp", "tp"), ("tp", "dp"), (0, 2)):
            assert vc.group_of(same, axes).process_group is flat.process_group
    return dist.get_pg_count() - before


def test_a_flattened_group_is_made_once():
    assert run(groups_made, 8) == [0] * 8


def some_members_only(rank, world_size):
    # torch 2.14 itself makes no mesh while ranks have made different numbers: before, and after.
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
    for _ in range(rank % 3):
        dist.new_group([rank], use_local_synchronization=True)
    found = None
    if mesh.get_coordinate()[1] == 0:
        found = vc.all_reduce(torch.tensor(rank), vc.group_of(mesh, ("dp", "tp"))).item()
    for _ in range(2 - rank % 3):
        dist.new_group([rank], use_local_synchronization=True)
    return found


def test_groups_are_made_by_their_members_only_whatever_they_made_before():
    # Coordinate 1 of cp makes none, and each rank has made another number of groups.
    assert run(some_members_only, 8) == [0 + 1 + 4 + 5, 0 + 1 + 4 + 5, None, None] * 2


def some_then_all(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
    if mesh.get_coordinate()[1] == 0:
        vc.group_of(mesh, ("dp", "tp"))
    later = init_device_mesh("cpu", (4, 2), mesh_dim_names=("all", "tp"))
    groups = vc.group_of(later, "all"), vc.group_of(mesh, ("dp", "cp"))
    return [vc.all_reduce(torch.tensor(rank), group).item() for group in groups]


def test_a_group_of_some_does_not_keep_torch_from_making_one_of_all():
    assert run(some_then_all, 8) == [[0 + 2 + 4 + 6] * 2, [1 + 3 + 5 + 7] * 2] * 4


def release(rank, world_size):
    from vescale_comm._groups.mesh_groups import _of_mesh

    gc.collect()
    before = len(_of_mesh)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    vc.group_of(mesh, ("dp", "tp"))
    during = len(_of_mesh)
    del mesh
    gc.collect()
    return during - before, len(_of_mesh) - before


def test_a_mesh_that_dies_releases_its_groups():
    assert run(release, 2) == [(1, 0)] * 2


def use_after_destruction(rank, world_size):
    group = vc.group_of(init_device_mesh("cpu", (world_size,)), 0)
    dist.destroy_process_group()
    gc.collect()
    vc.all_reduce(torch.ones(1), group)


def use_while_a_mesh_holds_it(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    group, kept = vc.group_of(mesh, 0), mesh.get_group(0)
    vc.all_reduce(torch.ones(1), group)  # so that the short road is known
    dist.destroy_process_group()
    assert kept is not None
    vc.all_reduce(torch.ones(1), group)


@pytest.mark.parametrize("use", [use_after_destruction, use_while_a_mesh_holds_it])
def test_use_after_the_world_is_gone(use):
    for outcome in outcomes(use, 2):
        assert "CommError" in outcome.kinds
        assert "was used after its process group was destroyed" in outcome.message


def outside(rank, world_size):
    vc.group_of(DeviceMesh("cpu", torch.arange(2)), 0)


def test_a_rank_outside_of_the_mesh_is_told():
    inside, _, third = outcomes(outside, 3)
    assert inside.value is None
    assert third.message == "rank 2 is not in the mesh of ranks 0, 1"


BAD_AXES = {
    "ddp": "unknown mesh axis 'ddp'",
    2: "unknown mesh axis 2",
    -3: "unknown mesh axis -3",
    True: "unknown mesh axis True",
    ("dp", "pp"): "unknown mesh axis 'pp'",
    ("dp", 0): "an axis is given twice in ('dp', 0)",
    (): "no axis given",
}


def bad_axes(rank, world_size):
    # Its own: of a mesh that was asked before, `True` is the 1 that is known.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return refusals({axes: partial(vc.group_of, mesh, axes) for axes in BAD_AXES})


def test_axes_that_the_mesh_does_not_have():
    there = "; the mesh has 'dp' (2), 'tp' (2)"
    expected = {axes: ("CommArgumentError", words + there) for axes, words in BAD_AXES.items()}
    assert run(bad_axes, 4) == [expected] * 4


def test_without_a_world_the_default_group_is_an_error():
    with pytest.raises(Exception, match="there is no default process group: call"):
        vc.as_group()
    with pytest.raises(ValueError, match=r"not a group: 'dp'. Pass group_of\(mesh, axes\)"):
        vc.as_group("dp")


@on_ranks(4)
def test_lanes_are_further_groups_of_the_same_ranks(rank, world_size):
    grid = torch.tensor([3, 1, 0, 2])
    mesh = DeviceMesh("cpu", grid.view(2, 2), mesh_dim_names=("dp", "tp"))
    for axes in ("dp", ("dp", "tp")):
        group, other, third = (
            vc.group_of(mesh, axes),
            *(vc.group_of(mesh, axes, lane=n) for n in (1, 2)),
        )
        assert vc.group_of(mesh, axes, lane=1) is other
        assert other.ranks == third.ranks == group.ranks
        assert other.axes == group.axes
        assert len({one.process_group for one in (group, other, third)}) == 3
        # What waits in one does not keep what goes by another.
        handle = vc.all_gather(torch.tensor([rank]), group, async_op=True)
        assert vc.all_gather(torch.tensor([rank]), other).tolist() == list(group.ranks)
        assert handle.wait().tolist() == list(group.ranks)


@on_ranks(4)
def test_lanes_are_made_by_their_members_alone(rank, world_size):
    meshes = [DeviceMesh("cpu", [one, one + 1], mesh_dim_names=("pp",)) for one in (0, 2)]
    mesh = meshes[rank // 2]
    if rank < 2:  # the others have made one group less, as programs of another kind do
        vc.group_of(mesh, "pp", lane=2)
        assert vc.all_gather(torch.tensor([rank]), vc.group_alone()).tolist() == [rank]
    group = vc.group_of(mesh, "pp", lane=1)
    assert vc.all_gather(torch.tensor([rank]), group).tolist() == list(group.ranks)
    # torch names groups of all ranks by how many each has made.
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    assert vc.all_reduce(torch.ones(()), vc.group_of(mesh, ("dp", "tp"))) == 4
