"""What tends to go wrong: a rank is killed, batches of few rows, NaN, parameters that come late.

Each is right, as on one device, or an error on every rank that names what is wrong.
"""

import atexit
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ports import free_port
from torch import Tensor, nn
from vescale_comm.testing import on_ranks
from zero_models import adamw, batch, distributed, make, require_same_values

SIZE, WHO = 3, 1


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_forward(model: nn.Module) -> None:
    model.get_submodule("blocks.1.mlp").register_forward_hook(die)


def in_backward(model: nn.Module) -> None:
    model.get_submodule("blocks.1.mlp").register_forward_hook(
        lambda module, args, output: output.register_hook(die) and None
    )


def before_the_step(model: nn.Module) -> None:
    model.before_step = die  # type: ignore[assignment]


PLACES = {one.__name__: one for one in (in_forward, in_backward, before_the_step)}


def program(place: str, zero: int, rank: int, port: int, folder: str) -> None:
    """Train; rank 1 is killed at that place in the second step."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=SIZE)
    said = "nothing"
    try:
        train_until_killed(place, zero, rank)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        sys.last_value = error
    Path(folder, str(rank)).write_text(said)
    atexit._run_exitfuncs()
    os._exit(0)


def train_until_killed(place: str, zero: int, rank: int) -> None:
    model = distributed(make(), {"dp": SIZE}, zero)
    optimizer = adamw(model.parameters())
    for step in range(3):
        if step == 1 and rank == WHO:
            PLACES[place](model)
        optimizer.zero_grad()
        torch.manual_seed(step)
        model(*batch(step)).backward()
        getattr(model, "before_step", len)([])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


KILLED = [
    # Processes take long to start.
    pytest.param("in_backward", 3, marks=pytest.mark.slow),
    pytest.param("in_forward", 3, marks=pytest.mark.slow),
    pytest.param("before_the_step", 0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("place", "zero"), KILLED)
def test_a_rank_that_is_killed_ends_all_with_its_name(tmp_path: Path, place: str, zero: int):
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vescale_comm.testing", "vescale_parallel"])
    ranks = [
        context.Process(target=program, args=(place, zero, rank, port, str(tmp_path)), daemon=True)
        for rank in range(SIZE)
    ]
    try:
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(60)
        assert not any(each.is_alive() for each in ranks)
    finally:
        for each in ranks:
            each.kill()
    for rank in range(SIZE):
        if rank != WHO:
            said = (tmp_path / str(rank)).read_text()
            assert f"rank {WHO}" in said, said
            assert "ended without a word" in said, said


class Late(nn.Module):
    """Scales what a module gives by a parameter that came late."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
@on_ranks(4, simulated=True)
def test_parameters_that_are_added_later_train_as_on_one_device(sizes: dict[str, int], zero: int):
    plain, model = make(), distributed(make(), sizes, zero)
    for one in (plain, model):
        # By a module that takes the place of another, and by a parameter of one that was there.
        one.blocks[0].dropout = Late()
        one.blocks[1].mlp.late = nn.Parameter(torch.ones(8))
        one.blocks[1].mlp.register_forward_hook(lambda module, args, output: output * module.late)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            torch.manual_seed(step)
            one(*batch(step)).backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
    require_same_values(model, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("zero", [0, 3])
@on_ranks(4, simulated=True)
def test_a_gradient_of_one_rank_that_is_not_a_number_stops_all(
    rank: int, world_size: int, zero: int
):
    model = distributed(make(), {"dp": world_size}, zero)

    def spoil(gradient: Tensor) -> Tensor:
        # One row of the batch, so the contribution of one rank.
        return torch.where(torch.arange(7)[:, None, None] == 4, float("nan"), gradient)

    hook = model.blocks[1].register_forward_hook(
        lambda module, args, output: output.register_hook(spoil) and None
    )
    loss = model(*batch(0))
    hook.remove()
    loss.backward()
    before = [one.detach().full_tensor() for one in model.parameters()]
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    for one, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(one.detach().full_tensor(), value)
