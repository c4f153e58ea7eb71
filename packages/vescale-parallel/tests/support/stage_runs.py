"""Training in stages beside one device that accumulates over the same microbatches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vescale_parallel import Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from zero_models import PARAMETERS, Decoder, whole

ROWS, TOKENS, VOCABULARY = 8, 5, 16


class Chain(nn.Module):
    """Blocks one after another, and a loss of what they give."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def make(tied: bool = False, blocks: int = 4) -> nn.Module:
    torch.manual_seed(3)
    return Decoder(tied=tied, blocks=blocks)


def batch(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, TOKENS + 1), generator=draws)
    return tokens[:, :-1], tokens[:, 1:]


def pieces_of(one: Tensor, parts: int) -> list[Tensor]:
    """The rows of each microbatch."""
    chunks = list(one.chunk(parts))
    return chunks if len(chunks) == parts else [p for p in one.tensor_split(parts) if len(p)]


def accumulate(
    model: Any,
    parts: int,
    *args: Tensor,
    scale: Callable[[Tensor], Tensor] = torch.as_tensor,
    **kwargs: Tensor,
) -> Tensor:
    """One device's step: gradients of the same microbatches are accumulated; the batch's loss.

    Args:
        model: gives a loss, or something that has one.
        parts: the number of microbatches.
        args: tensors of one number of rows, which are divided.
        scale: that of a GradScaler.
        kwargs: like `args`.
    """
    given = [*args, *kwargs.values()]
    rows, total = len(given[0]), torch.zeros((), device=given[0].device)
    for pieces in zip(*(pieces_of(one, parts) for one in given), strict=True):
        named = dict(zip(kwargs, pieces[len(args) :], strict=True))
        found = model(*pieces[: len(args)], **named)
        loss = scale(getattr(found, "loss", found)) * (len(pieces[0]) / rows)
        if torch.is_grad_enabled():
            loss.backward()
        total += loss.detach()
    return total


def step_both(
    model: nn.Module, plain: Any, parts: int, *args: Any, rtol: float = 1e-6, **kwargs: Any
) -> None:
    """A step of each from the same random state: they have the same loss, and end alike."""
    here = torch.get_rng_state()
    expected = accumulate(plain, parts, *args, **kwargs)
    there = torch.get_rng_state()
    torch.set_rng_state(here)
    found = forward_backward(model, *args, **kwargs)
    assert torch.equal(torch.get_rng_state(), there)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol / 10)


def require_gradients(
    model: nn.Module, plain: nn.Module, rtol: float = 1e-5, atol: float = 1e-7
) -> None:
    """Both have the same gradients, and None in the same places."""
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if other.grad is not None:
            torch.testing.assert_close(whole(one.grad), other.grad, rtol=rtol, atol=atol, msg=name)


def failures_of(call: Callable[[], object]) -> str:
    """What a call raises, in words."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def staged(model: nn.Module, sizes: dict[str, int], **words: Any) -> Any:
    """The model in stages over a mesh of these sizes; `words` are those of `Plan.with_`."""
    how = Plan(pipeline="1f1b").with_(**words)
    return parallelize(model, make_mesh(device_type="cpu", **sizes), how)


def plan(schedule: str, parts: int, **fields: Any) -> Plan:
    return Plan(parameters=PARAMETERS, pipeline=schedule, microbatches=parts).with_(**fields)


def train(
    rank: int, world_size: int, sizes: dict[str, int], how: Plan, tied: bool, rows: int
) -> None:
    plain, model = make(tied), make(tied)
    torch.manual_seed(11)
    parallelize(model, make_mesh(device_type="cpu", **sizes), how)
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    for step in range(3):
        step_both(model, plain, 4, *batch(step, rows))
        require_gradients(model, plain)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, plain)]
        torch.testing.assert_close(whole(norms[0]), norms[1], rtol=1e-5, atol=1e-7)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(model.state_dict().items(), plain.parameters(), strict=False):
        torch.testing.assert_close(whole(one), other.data, rtol=1e-5, atol=1e-6, msg=name)


def scaled_steps(
    model: nn.Module, how: Plan | None, sizes: dict[str, int], parts: int = 1, rows: int = ROWS
) -> list[Tensor]:
    """Scales and last parameters of three steps; without a plan one device's, in `parts`.

    In the second step a parameter of the first stage gets an infinite gradient.
    """
    if how is not None:
        parallelize(model, make_mesh(device_type="cpu", **sizes), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(torch.zeros(()))  # on every rank: only one has the loss
    told = []
    for step in range(3):
        torch.manual_seed(step)
        if how is None:
            accumulate(model, parts, *batch(step, rows), scale=scaler.scale)
        else:
            forward_backward(model, *batch(step, rows), loss=scaler.scale)
        if step == 1:
            gradient = model.get_parameter("blocks.0.mlp.up.weight").grad
            assert gradient is not None
            gradient.mul_(float("inf"))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told.append(torch.tensor(scaler.get_scale()))
    return [*told, *(whole(one).detach() for one in model.parameters())]
