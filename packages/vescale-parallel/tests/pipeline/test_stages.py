"""A model in stages trains as one device does that accumulates over the same microbatches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_comm.testing import run
from vescale_dtensor import DTensor
from vescale_parallel import Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from zero_models import PARAMETERS, Decoder

ROWS, TOKENS, VOCABULARY = 8, 5, 16


def make(tied: bool = False, blocks: int = 4) -> nn.Module:
    torch.manual_seed(3)
    return Decoder(tied=tied, blocks=blocks)


def batch(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, TOKENS + 1), generator=draws)
    return tokens[:, :-1], tokens[:, 1:]


def one_device(model: nn.Module, seed: int, parts: int, rows: int = ROWS) -> Tensor:
    """The reference: accumulation over the same microbatches."""
    size = -(-rows // parts)
    total = torch.zeros(())
    for pieces in zip(*(one.split(size) for one in batch(seed, rows)), strict=True):
        loss = model(*pieces) * (len(pieces[0]) / rows)
        loss.backward()
        total += loss.detach()
    return total


def whole(one: Any) -> Tensor:
    return one.full_tensor() if isinstance(one, DTensor) else one


def plan(schedule: str, parts: int, **fields: Any) -> Plan:
    return Plan(
        parameters=PARAMETERS,
        pipeline={"schedule": schedule, "microbatches": parts},
        **fields,
    )


@pytest.mark.parametrize(
    ("sizes", "schedule", "tied", "rows"),
    [
        ({"pp": 2}, "gpipe", False, 8),
        ({"pp": 2}, "1f1b", True, 7),
        ({"pp": 4}, "1f1b", False, 8),
        ({"pp": 4}, "gpipe", True, 7),
        ({"pp": 2}, "interleaved", False, 8),
        ({"pp": 2}, "interleaved", True, 7),
        ({"pp": 2, "dp": 2}, "1f1b", False, 8),
        ({"pp": 2, "dp": 2}, "1f1b", True, 7),
        ({"pp": 2, "tp": 2}, "1f1b", False, 8),
        ({"pp": 2, "tp": 2}, "gpipe", True, 7),
        ({"dp": 2, "pp": 2}, "interleaved", False, 7),
    ],
    ids=str,
)
def test_a_model_in_stages_trains_like_one_device(
    sizes: dict[str, int], schedule: str, tied: bool, rows: int
):
    simulate(torch.Size(sizes.values()).numel())(train, sizes, plan(schedule, 4), tied, rows)


def train(
    rank: int, world_size: int, sizes: dict[str, int], how: Plan, tied: bool, rows: int
) -> None:
    plain, model = make(tied), make(tied)
    torch.manual_seed(11)
    parallelize(model, make_mesh(device_type="cpu", **sizes), how)
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    for step in range(3):
        here = torch.get_rng_state()
        expected = one_device(plain, step, 4, rows)
        there = torch.get_rng_state()
        torch.set_rng_state(here)
        found = forward_backward(model, *batch(step, rows))
        assert torch.equal(torch.get_rng_state(), there)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), name
            torch.testing.assert_close(whole(one.grad), other.grad, rtol=1e-5, atol=1e-7)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, plain)]
        torch.testing.assert_close(whole(norms[0]), norms[1], rtol=1e-5, atol=1e-7)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(model.state_dict().items(), plain.parameters(), strict=False):
        torch.testing.assert_close(whole(one), other.data, rtol=1e-5, atol=1e-6, msg=name)


def test_processes_do_as_simulated_ranks():
    run(train, 2, {"pp": 2}, plan("1f1b", 4), True, 7)


@pytest.mark.parametrize(
    ("sizes", "schedule", "zero", "tied"),
    [
        ({"pp": 2, "dp": 2}, "1f1b", 3, False),
        ({"pp": 2, "dp": 2}, "gpipe", 2, True),
        ({"pp": 2, "dp": 2}, "interleaved", 1, False),
        ({"pp": 2, "dp": 2, "tp": 2}, "1f1b", 3, True),
    ],
    ids=str,
)
def test_stages_are_sharded_by_zero(sizes: dict[str, int], schedule: str, zero: int, tied: bool):
    ranks = torch.Size(sizes.values()).numel()
    simulate(ranks)(train, sizes, plan(schedule, 4, zero=zero), tied, 7)


@pytest.mark.parametrize("checkpoint", ["full", "selective"])
def test_blocks_are_computed_again(checkpoint: str):
    simulate(2)(train, {"pp": 2}, plan("1f1b", 4, checkpoint=checkpoint), False, 8)


def test_checkpoints_move_between_meshes(tmp_path: Path):
    ckpt = pytest.importorskip("vescale_ckpt")
    path = str(tmp_path / "saved")

    def state_of(sizes: dict[str, int], seed: int, **fields: Any) -> tuple[nn.Module, Any]:
        model = make(True)
        parallelize(model, make_mesh(device_type="cpu", **sizes), plan("1f1b", 4, **fields))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        forward_backward(model, *batch(seed))
        optimizer.step()
        return model, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def save(rank: int, world_size: int) -> list[Tensor]:
        model, state = state_of({"pp": 2, "dp": 2}, 0, zero=3)
        ckpt.save(path, state)
        return [whole(one).detach() for one in model.parameters()]

    def load(rank: int, world_size: int) -> list[Tensor]:
        model, state = state_of({"pp": 2, "tp": 2}, 1)
        ckpt.load(path, into=state)
        return [whole(one).detach() for one in model.parameters()]

    expected, found = simulate(4)(save), simulate(4)(load)
    assert all(map(torch.equal, expected[0], found[3]))
