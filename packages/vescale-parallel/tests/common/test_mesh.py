"""Sizes become a named mesh in the documented order, or an error that says what would fit."""

import subprocess
import sys

import pytest
import torch.distributed as dist
from vescale_comm import simulate
from vescale_parallel import DisagreementError, MeshError, mesh
from vescale_parallel._common.mesh import resolve_sizes


@pytest.mark.parametrize(
    ("sizes", "world", "expected"),
    [
        ({"tp": 2, "dp": 2}, 4, {"dp": 2, "tp": 2}),
        ({"tp": 2, "pp": 3, "dp": -1}, 12, {"pp": 3, "dp": 2, "tp": 2}),
        ({"tp": 2, "dp": -1}, 2, {"dp": 1, "tp": 2}),
        ({"rows": 2, "dp": 3}, 6, {"rows": 2, "dp": 3}),
        ({"ep": 1, "cp": 1}, 1, {"cp": 1, "ep": 1}),
    ],
)
def test_sizes_and_order(sizes: dict[str, int], world: int, expected: dict[str, int]):
    resolved = resolve_sizes(sizes, world)
    assert list(resolved.items()) == list(expected.items())


def test_a_product_that_does_not_fit():
    with pytest.raises(MeshError) as caught:
        resolve_sizes({"dp": 2, "tp": 3}, 4)
    text = str(caught.value)
    for part in ("dp=2, tp=3", "needs 6", "4 run", "--nproc-per-node 6", "-1"):
        assert part in text


def test_a_rest_that_does_not_divide():
    with pytest.raises(MeshError, match=r"make 3, which does not divide the 4 process"):
        resolve_sizes({"dp": -1, "tp": 3}, 4)


@pytest.mark.parametrize("size", [0, -2, 1.5, "2", True, None])
def test_a_size_that_is_no_size(size: object):
    with pytest.raises(MeshError, match="positive integer"):
        resolve_sizes({"dp": size}, 4)  # type: ignore[dict-item]


def test_two_sizes_cannot_be_open():
    with pytest.raises(MeshError, match="only one size may be -1"):
        resolve_sizes({"dp": -1, "tp": -1}, 4)


@pytest.mark.parametrize(
    ("size", "rank", "said"),
    [
        (None, "1", "WORLD_SIZE is not set and RANK is 1"),
        (None, "0", "WORLD_SIZE is not set and RANK is 0"),
        ("2", None, "WORLD_SIZE is 2 and RANK is not set"),
        ("two", "0", "WORLD_SIZE is two"),
        ("0", "0", "WORLD_SIZE is 0"),
        ("2", "2", "RANK is 2"),
        ("2", "-1", "RANK is -1"),
    ],
)
def test_half_of_a_launcher(
    size: str | None, rank: str | None, said: str, monkeypatch: pytest.MonkeyPatch
):
    for name, value in (("WORLD_SIZE", size), ("RANK", rank)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match=said):
        mesh(device_type="cpu")
    assert not dist.is_initialized()


def test_a_world_of_one_needs_no_rank(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    try:
        assert mesh(device_type="cpu").size() == 1
    finally:
        dist.destroy_process_group()


def test_a_mesh_of_one_process_without_a_launcher():
    assert not dist.is_initialized()
    try:
        made = mesh(tp=1, dp=-1, device_type="cpu")
        assert made.mesh_dim_names == ("dp", "tp")
        assert tuple(made.shape) == (1, 1)
        with pytest.raises(MeshError, match="needs 2 process"):
            mesh(dp=2, device_type="cpu")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("ending", "left"), [("", "False"), ("raise OSError", "True")])
def test_a_script_that_ends_leaves_no_group_of_ours(ending, left):
    """Else gloo's threads abort it now and then; after an error nobody is waited for."""
    script = f"""
import atexit
import torch.distributed as dist
atexit.register(lambda: print(dist.is_initialized()))  # runs after what is registered later
from vescale_parallel import mesh
mesh(tp=1, device_type="cpu")
{ending}
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout.strip() == left, ran.stderr


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "10", True])
def test_a_timeout_that_is_no_time(timeout: object):
    with pytest.raises(MeshError, match="seconds above 0"):
        mesh(device_type="cpu", timeout=timeout)  # type: ignore[arg-type]
    assert not dist.is_initialized()


TIMES = """
from datetime import timedelta
import torch.distributed as dist
from vescale_parallel import mesh
for mine, its in ((None, None), (50, None), (50, 70), (None, 70)):
    if its:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1,
                                timeout=timedelta(seconds=its))
    made = mesh(dp=1, tp=1, device_type="cpu", timeout=mine)
    for group in (dist.group.WORLD, made.get_group("tp")):
        backend = group._get_backend(dist.torch.device("cpu"))
        print(backend.options._timeout.total_seconds(), end=" ")
    dist.destroy_process_group()
    print()
"""


def test_who_makes_the_process_group_sets_its_timeout():
    command = [sys.executable, "-c", TIMES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    found = [line.split() for line in done.stdout.splitlines()]
    assert found[:3] == [["600.0"] * 2, ["50.0"] * 2, ["50.0"] * 2], done.stderr
    assert found[3][0] == "70.0"


def other_calls(rank: int, world_size: int) -> list[str]:
    told = []
    for asked in ({"dp": 4}, {"tp": 2, "rows": 2}, {"dp": 3}, {"tp": 2, "dp": 0}):
        with pytest.raises(DisagreementError) as caught:
            mesh(device_type="cpu", **(asked if rank == 2 else {"dp": 2, "tp": 2}))
        told.append(str(caught.value))
    with pytest.raises(MeshError, match="dp=3"):
        mesh(device_type="cpu", dp=3)
    # Nobody waits, and all can go on together.
    assert mesh(device_type="cpu", dp=2, tp=2).shape == (2, 2)
    return told


def test_ranks_that_ask_for_other_meshes_are_named_on_every_rank():
    told = simulate(4)(other_calls)
    assert all(one == told[0] for one in told)
    sizes, names, product, none = told[0]
    assert "mesh 'sizes': dp=2, tp=2 on ranks 0, 1, 3; dp=4 on rank 2" in sizes
    assert "tp=2, rows=2 on rank 2" in names
    assert "mesh(dp=3) needs 3 process(es) and 4 run(s)" in product
    assert "positive integer" in none
