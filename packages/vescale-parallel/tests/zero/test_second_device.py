"""`offload` with a device that is not the host: the same bits, and its memory by its allocator.

Every operator that would mix both devices raises, so a run that ends has moved what it had to. Two
processes, as autograd runs nodes of such a device in a thread of their own.
"""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ports import free_port

MODES: list[tuple[int, dict[str, Any]]] = [
    (3, {"offload": True}),
    (3, {"offload": "optimizer", "reduce_ahead": 1}),
    (2, {"offload": True}),
    (1, {"offload": True}),
    (3, {"offload": {"*.up.*": "optimizer", "*": True}, "checkpoint": "full"}),
    (3, {"offload": True, "static": True}),
]


def work(rank: int, size: int, port: int, folder: str) -> None:
    import offload_runs
    import second_device
    from torch.distributed.device_mesh import DeviceMesh
    from vescale_parallel import ParallelError
    from zero_models import schedule_of

    torch.set_num_threads(1)
    device = second_device.compiled(Path(folder))
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(second_device.NAME, rank=rank, world_size=size, init_method=address)
    mesh = DeviceMesh(second_device.NAME, torch.arange(size), mesh_dim_names=("dp",))
    for zero, words in MODES:
        # Where buffers are others, so are the parts whose norms are added up to clip by.
        runs = ["accumulated"] if isinstance(words["offload"], dict) else ["stepped", "accumulated"]
        for run in runs:  # and not "copied": torch copies no storage of such a device
            try:
                model = offload_runs.alike(mesh, zero, run, dict(words))
            except AssertionError as error:
                raise AssertionError(f"zero={zero}, {words}, {run}: {error}") from error
            for one in model.parameters():
                assert one.device.type == ("cpu" if one.ndim else second_device.NAME)
            del model
    # By the allocator: between steps the device holds what the table says, and no shard.
    before = device.live()
    model = offload_runs.built(mesh, 3, offload=True)
    offload_runs.stepped(model)
    rows = [buffer.row for unit in schedule_of(model).units for buffer in unit.buffers]
    scalars = [one for one in model.parameters() if not one.ndim]
    # Of each a value and two states of Adam's are gone with the optimizer, its gradient was set to
    # None; torch's allocator rounds nothing here.
    assert sum(row.stored_bytes for row in rows) == 0
    assert device.live() - before <= 64 * len(scalars), (device.live(), before)
    device.reset_peak()
    offload_runs.backward(model, 0)
    most = sorted(row.gathered_bytes for row in rows)
    assert device.peak() - device.live() >= most[-1]
    in_stages(
        DeviceMesh(second_device.NAME, torch.arange(size)[:, None], mesh_dim_names=("pp", "dp"))
    )
    model.to(second_device.NAME)
    # Moved to a device of this kind parameters are other objects; to a GPU see test_offload.
    with pytest.raises(ParallelError, match="was replaced by another object"):
        offload_runs.backward(model, 0)
    dist.destroy_process_group()


def in_stages(mesh: Any) -> None:
    """What stages hold lies on the host, with the bits of stages on the device."""
    import offload_runs
    from vescale_parallel import forward_backward
    from zero_models import adamw, batch, whole

    for zero, schedule, offload in (
        (3, "1f1b", True),
        (3, "zb-h1", "optimizer"),
        (2, "gpipe", True),
    ):
        models = []
        for word in (offload, None):
            level = zero if word else 0  # one rank has shards with offload only
            model = offload_runs.built(
                mesh,
                level,
                pipeline=schedule,
                microbatches=2,
                offload=word,
                activations={},
                axes=("pp", "dp", "tp"),
            )
            optimizer = adamw(model.parameters())
            for step in range(3):
                tokens = [one.to(mesh.device_type) for one in batch(step)]
                forward_backward(model, *tokens)
                optimizer.step()
                optimizer.zero_grad()
            models.append(model)
        for (name, one), other in zip(
            models[0].named_parameters(), models[1].parameters(), strict=True
        ):
            found, expected = (whole(each.detach()).to("cpu") for each in (one, other))
            assert torch.equal(found, expected), (zero, schedule, name)
        assert sum(one.device.type == "cpu" for one in models[0].parameters()) > 4


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("c++") and shutil.which("ninja")), reason="there is no compiler here"
)
def test_the_bits_of_a_model_on_the_device(tmp_path: Path):
    mp.spawn(work, (2, free_port(), str(tmp_path)), nprocs=2)


def simulated(_: int, folder: str) -> None:
    import second_device
    from vescale_comm import SimulationError, all_reduce, simulate

    second_device.compiled(Path(folder))

    def work(rank: int, size: int, multithreaded: bool) -> tuple[list[float], list[str]]:
        x = torch.full((2,), rank + 1.0, device=second_device.NAME, requires_grad=True)
        threads: list[str] = []
        doubled = x * 2
        doubled.register_hook(lambda gradient: threads.append(threading.current_thread().name))
        total = all_reduce(doubled).sum()
        if multithreaded:
            with torch.autograd.set_multithreading_enabled(True):
                total.backward()
        else:
            total.backward()
        assert x.grad is not None
        return x.grad.tolist(), threads

    found = simulate(2).run(work, False)
    assert found == [([4.0, 4.0], [f"simulated-rank-{rank}"]) for rank in range(2)]
    # What autograd does for such a device by itself: a thread that is none of the ranks'.
    with pytest.raises(SimulationError, match="from a thread of its own"):
        simulate(2).run(work, True)


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("c++") and shutil.which("ninja")), reason="there is no compiler here"
)
def test_a_backward_of_simulated_ranks_communicates(tmp_path: Path):
    mp.spawn(simulated, (str(tmp_path),), nprocs=1)
