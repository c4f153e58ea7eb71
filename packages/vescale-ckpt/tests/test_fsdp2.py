"""torch's own FSDP2, module and optimizer: saved on 4 ranks, trained on from there on 2 and 1."""

import pytest
import torch

testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")


def train(rank, world_size, path, steps):
    """Go on from `path` if something is there; returns the loss of every step."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from vescale_ckpt import NotFoundError, init_optimizer_state, load, save

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    mesh = testing.device_mesh((world_size,), ("dp",))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    init_optimizer_state(optimizer)
    into = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 0}
    first = 0
    try:
        loaded = load(path, into)
        optimizer.load_state_dict(loaded["optim"])
        first = loaded["step"]
    except NotFoundError:
        optimizer.state.clear()
    losses = []
    for step in range(first, first + steps):
        # Every rank sees the same batch, so that the mean over ranks is the same for any number.
        batch = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 4))
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    save(path, {**state, "step": first + steps}, overwrite=True)
    return losses


def test_fsdp2_from_4_ranks_to_2_and_1(path):
    expected = testing.run(train, 1, f"{path}-one", 9)[0]
    assert expected[-1] < expected[0]
    found = [testing.run(train, size, path, 3)[0] for size in (4, 2, 1)]
    assert [loss for part in found for loss in part] == expected
