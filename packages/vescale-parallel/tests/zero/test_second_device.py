"""`offload` with a device that is not the host: the same bits, and its memory by its allocator.

Every operator that would mix both devices raises, so a run that ends has moved what it had to. Two
processes, as autograd runs nodes of such a device in a thread of their own.
"""

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MODES: list[tuple[int, dict[str, Any]]] = [
    (3, {"offload": True}),
    (3, {"offload": "optimizer", "behind": 1}),
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
    model.to(second_device.NAME)
    # Moved to a device of this kind parameters are other objects; to a GPU see test_offload.
    with pytest.raises(ParallelError, match="was replaced by another object"):
        offload_runs.backward(model, 0)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("c++") and shutil.which("ninja")), reason="there is no compiler here"
)
def test_the_bits_of_a_model_on_the_device(tmp_path: Path):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    mp.spawn(work, (2, port, str(tmp_path)), nprocs=2)
