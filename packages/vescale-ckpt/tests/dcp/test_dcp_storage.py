"""Through our storage, DCP's `save` and `load` and ours read each other, on any number of ranks.

What fails, fails on every rank, and leaves nothing.
"""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import vescale_ckpt
from edited_checkpoint import damage
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from vescale_ckpt.dcp import StorageReader, StorageWriter


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        # DCP says that there is no process group, and that metadata was not found.
        warnings.simplefilter("ignore", UserWarning)
        yield


def state(fill=1.0):
    return {
        "model": {"0.weight": torch.full((3, 2), fill), "empty": torch.zeros(0, 3)},
        "optim": {
            "state": {0: {"step": torch.tensor(fill), "half": torch.full((4,), fill).bfloat16()}},
            "param_groups": [{"lr": 0.1 * fill, "betas": (0.9, 0.99), "params": [0, 1]}],
        },
        "epoch": int(fill),
        "names": ["a", "b"],
        "none": None,
    }


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def cause(info):
    """Our error, inside of what DCP raises."""
    (found,) = {str(failure[0]) for failure in info.value.failures.values()}
    return found


def test_dcp_saves_what_load_reads(path):
    dcp.save(state(3.0), storage_writer=StorageWriter(path))
    assert vescale_ckpt.verify(path).tensors == 4
    found = vescale_ckpt.read(path)
    assert equal({**found, "optim": dict(found["optim"])}, state(3.0))
    into = state(0.0)
    assert equal(vescale_ckpt.load(path, into), state(3.0))
    assert into["model"]["0.weight"].unique().tolist() == [3.0]


def test_save_writes_what_dcp_loads(path):
    vescale_ckpt.save(path, state(3.0))
    into = state(0.0)
    dcp.load(into, storage_reader=StorageReader(path))
    assert equal(into, state(3.0))


def test_one_writer_and_checkpoint_ids(tmp_path):
    writer, reader = StorageWriter(), StorageReader()
    for step in (1.0, 2.0):
        dcp.save(state(step), checkpoint_id=f"{tmp_path}/{step}", storage_writer=writer)
    for step in (1.0, 2.0):
        into = state(0.0)
        dcp.load(into, checkpoint_id=f"{tmp_path}/{step}", storage_reader=reader)
        assert equal(into, state(step))


def test_overwriting_is_asked_for(path):
    dcp.save({"w": torch.ones(2)}, storage_writer=StorageWriter(path))
    with pytest.raises(dcp.CheckpointException) as info:
        dcp.save({"w": torch.zeros(2)}, storage_writer=StorageWriter(path))
    assert "pass overwrite=True" in cause(info)
    dcp.save({"w": torch.zeros(2)}, storage_writer=StorageWriter(path, overwrite=True))
    assert vescale_ckpt.read(path)["w"].tolist() == [0, 0]


NOT_PLAIN = [
    (np.ones(3), "at 'x': not a plain value"),
    ((torch.ones(2), 1), "at 'x': tensors inside a tuple"),
    (Path, "at 'x': not a plain value"),
]


@pytest.mark.parametrize(("value", "said"), NOT_PLAIN)
def test_what_is_no_plain_value_leaves_nothing(path, value, said):
    writer = StorageWriter(path)
    with pytest.raises(dcp.CheckpointException) as info:
        dcp.save({"w": torch.ones(2), "x": value}, storage_writer=writer)
    assert said in cause(info)
    with pytest.raises(vescale_ckpt.NotFoundError):
        vescale_ckpt.read(path)
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    assert [one.name for one in Path(path).parent.iterdir()] == [Path(path).name]


def test_loads_that_do_not_fit(path):
    vescale_ckpt.save(path, {"w": torch.ones(2), "own": vescale_ckpt.RankLocal(3)})
    with pytest.raises(dcp.CheckpointException) as info:
        dcp.load({"w": torch.ones(2).bfloat16()}, storage_reader=StorageReader(path))
    assert "the checkpoint holds float32, the state has torch.bfloat16" in cause(info)
    into = {"w": torch.zeros(2).bfloat16()}
    dcp.load(into, storage_reader=StorageReader(path, cast=True))
    assert into["w"].tolist() == [1, 1]
    with pytest.raises(dcp.CheckpointException) as info:
        dcp.load({"w": torch.zeros(2).int()}, storage_reader=StorageReader(path, cast=True))
    assert "the state has torch.int32; those are other kinds of numbers" in cause(info)
    with pytest.raises(dcp.CheckpointException) as info:
        dcp.load({"own": 0}, storage_reader=StorageReader(path))
    assert "use vescale_ckpt.load" in cause(info)
    with pytest.raises(dcp.CheckpointException) as info:
        dcp.load({"w": torch.zeros(2)}, storage_reader=StorageReader(f"{path}-none"))
    # torch 2.11 keeps to itself why there is no metadata.
    assert re.search("there is no checkpoint at|metadata is None", cause(info))


def test_damage_is_found(path):
    dcp.save({"w": torch.arange(1000.0)}, storage_writer=StorageWriter(path))
    damage(path, -5)
    with pytest.raises(dcp.CheckpointException) as info:
        dcp.load({"w": torch.zeros(1000)}, storage_reader=StorageReader(path))
    assert "do not match their checksum" in cause(info)


def built(world_size, seed):
    from torch.distributed.fsdp import fully_shard
    from vescale_comm import testing

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    mesh = testing.device_mesh((world_size,), ("dp",))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model, optimizer, steps):
    for _ in range(steps):
        model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model, optimizer):
    found = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    flat = [*found["model"].values()]
    flat += [v for one in found["optim"]["state"].values() for v in one.values()]
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in flat]


def saved(rank, world_size, path):
    """Train two steps; save now, then without waiting; return what was saved."""
    model, optimizer = built(world_size, 0)
    train(model, optimizer, 2)
    parts = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save({**parts, "step": 2}, storage_writer=StorageWriter(path))
    handle = dcp.async_save({**parts, "step": 2}, storage_writer=StorageWriter(f"{path}-async"))
    handle.result()
    refused = None
    try:
        dcp.save(parts, storage_writer=StorageWriter(path))
    except dcp.CheckpointException as error:
        refused = str(error)
    return whole(model, optimizer), refused


def loaded(rank, world_size, path):
    """Load into other numbers: through DCP, and by `load`, into FSDP2's sharded state."""
    found = []
    for load in ("dcp", "dcp async", "ours"):
        model, optimizer = built(world_size, 1)
        train(model, optimizer, 1)
        into = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        into["step"] = 0
        if load == "ours":
            into = vescale_ckpt.load(path, into)
        else:
            source = f"{path}-async" if "async" in load else path
            dcp.load(into, storage_reader=StorageReader(source))
        set_state_dict(
            model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optim"]
        )
        found.append((load, into["step"], whole(model, optimizer)))
    return found


def test_fsdp2_from_4_ranks_to_2_and_1(path):
    testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")
    ranks = testing.run(saved, 4, path)
    expected = ranks[0][0]
    assert all("pass overwrite=True" in refused for _, refused in ranks)
    assert vescale_ckpt.verify(path).tensors == vescale_ckpt.verify(f"{path}-async").tensors == 16
    for size in (2, 1):
        for found in testing.run(loaded, size, path):
            for by, step, tensors in found:
                assert step == 2, by
                assert list(map(torch.equal, tensors, expected)) == [True] * 16, (size, by)
