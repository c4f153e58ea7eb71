"""What programs do around their training steps, on layouts and beside one device."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from vescale_dtensor.state_dict import pickled
from vescale_parallel import Pipeline, PipelineError, Plan, deferred, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh

ROWS = 8


class Squash(nn.Module):
    """`tanh`, in which somebody may interrupt the program."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupted = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.interrupted == "forward":
            raise KeyboardInterrupt
        x = x.tanh()
        if self.interrupted == "backward" and x.requires_grad:
            x.register_hook(_interrupt)
        return x


def _interrupt(gradient: Tensor) -> None:
    raise KeyboardInterrupt


class Tower(nn.Module):
    """A layer, three alike, a layer; it returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), Squash()) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.up(x).tanh()
        for block in self.blocks:
            x = block(x)
        return (self.head(x) - y).square().mean()


_TP = {
    "blocks.*.weight": "tp:0",
    "blocks.*.bias": "tp:0",
    "*": "replicate",
}
_STAGES: dict[str, Any] = {"pipeline": Pipeline(stages="blocks.*"), "microbatches": 2}
_DP: dict[str, Any] = {"batch": "dp:0", "axes": ("dp",)}

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    **{f"zero{zero}": ({"dp": 2}, {**_DP, "zero": zero}) for zero in range(4)},
    "tp": ({"tp": 2}, {"parameters": _TP, "batch": None, "axes": ("tp",)}),
    "pp": ({"pp": 2}, {**_STAGES, "batch": None, "axes": ("pp",)}),
    "pp zero3": (
        {"pp": 2, "dp": 2},
        {**_STAGES, "batch": "dp:0", "zero": 3, "axes": ("pp", "dp")},
    ),
}
"""By name: sizes of a mesh, and the words of a plan."""


def make(kind: Callable[[], nn.Module] = Tower) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def loaded_when_deferred() -> nn.Module:
    """A deferred model that was given real values."""
    with deferred():
        model = Tower()
    model.load_state_dict(make().state_dict())
    return model


def ranks_of(layout: str) -> int:
    sizes, _ = LAYOUTS[layout]
    total = 1
    for size in sizes.values():
        total *= size
    return total


def distributed(model: nn.Module, layout: str, *, static: bool = False) -> nn.Module:
    sizes, words = LAYOUTS[layout]
    return parallelize(model, make_mesh(device_type="cpu", **sizes), Plan(**words), static=static)


def batch(step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 5, generator=draws), torch.randn(ROWS, 3, generator=draws)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    optimizer.zero_grad()
    loss = forward_backward(model, *batch(step))
    optimizer.step()
    return float(loss)


def evaluated(model: nn.Module) -> float:
    with torch.no_grad():
        return float(forward_backward(model, *batch(99)))


def values(model: nn.Module) -> list[float]:
    """One number of each parameter."""
    found = []
    for one in model.parameters():
        whole: Any = one.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        found.append(float((whole * torch.arange(1.0, whole.numel() + 1).view_as(whole)).sum()))
    return found


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def moving_average(model: nn.Module) -> list[float]:
    """The usual class: `.data` is taken out for an evaluation, and put back."""
    optimizer, found = adam(model), []
    shadow = {name: one.data.clone() for name, one in model.named_parameters()}
    for step in range(3):
        found.append(trained(model, optimizer, step))
        for name, one in model.named_parameters():
            shadow[name] = 0.5 * one.data + 0.5 * shadow[name]
        backup = {}
        for name, one in model.named_parameters():
            backup[name] = one.data
            one.data = shadow[name]
        found.append(evaluated(model))
        for name, one in model.named_parameters():
            one.data = backup[name]
    return found


def average_of_weights(model: nn.Module) -> list[float]:
    """torch's `AveragedModel`."""
    optimizer, found = adam(model), []
    average = AveragedModel(model)
    for step in range(3):
        found.append(trained(model, optimizer, step))
        average.update_parameters(model)
        found.append(evaluated(average.module))
    return found + values(average.module)


def finite_differences(model: nn.Module) -> list[float]:
    found = []
    for one in model.parameters():
        saved = one.data
        one.data = saved + 0.1
        above = evaluated(model)
        one.data = saved - 0.1
        found += [above, evaluated(model)]
        one.data = saved
    first, second = (block[0].weight for block in list(model.blocks)[:2])
    first.data, second.data = second.data, first.data
    return [*found, evaluated(model), *values(model)]


def deep_copy(model: nn.Module) -> list[float]:
    """A teacher: the copy stands still, then trains by itself."""
    optimizer = adam(model)
    found = [trained(model, optimizer, 0)]
    teacher = copy.deepcopy(model)
    found += [trained(model, optimizer, 1), evaluated(teacher), evaluated(model)]
    return [*found, trained(teacher, adam(teacher), 2), evaluated(model), *values(teacher)]


def saved(model: nn.Module) -> list[float]:
    """Its state, in a file that any program reads."""
    trained(model, adam(model), 0)
    with pickled("whole"):
        torch.save(model.state_dict(), file := io.BytesIO())
    file.seek(0)
    again = make()
    again.load_state_dict(torch.load(file, weights_only=True))  # noqa: TID251
    return [*values(again), trained(again, adam(again), 1)]


def loaded(model: nn.Module) -> list[float]:
    """A model that was deferred, and given values by `load_state_dict`."""
    return [trained(model, adam(model), 0), *values(model)]


def interrupted(model: nn.Module, where: str, call: Callable[[], Any]) -> None:
    """Interrupt a call in the second block, as Ctrl-C does."""
    squash: Any = model.blocks[1][1]  # type: ignore[index]
    squash.interrupted = where
    # The other error on ranks of other stages.
    with pytest.raises((KeyboardInterrupt, PipelineError)) as raised:
        call()
    assert "KeyboardInterrupt" in repr(raised.value)
    squash.interrupted = ""


def interrupted_step(model: nn.Module, where: str) -> list[float]:
    optimizer = adam(model)
    found = [trained(model, optimizer, 0)]
    for _ in range(2):
        interrupted(model, where, lambda: trained(model, optimizer, 1))
        found += values(model)
        found += [float(one.norm()) for one in model.state_dict().values()]
    return [*found, trained(model, optimizer, 2), evaluated(model)]


def interrupted_forward(model: nn.Module) -> list[float]:
    return interrupted_step(model, "forward")


def interrupted_backward(model: nn.Module) -> list[float]:
    return interrupted_step(model, "backward")


def interrupted_evaluation(model: nn.Module) -> list[float]:
    optimizer = adam(model)
    found = [trained(model, optimizer, 0)]
    for _ in range(2):
        interrupted(model, "forward", lambda: evaluated(model))
        found += values(model)
    found += [trained(model, optimizer, 1), evaluated(model)]
    return found


WAYS: dict[str, Callable[[nn.Module], list[float]]] = {
    one.__name__: one
    for one in (
        moving_average,
        average_of_weights,
        finite_differences,
        saved,
        loaded,
        interrupted_forward,
        interrupted_backward,
        interrupted_evaluation,
        deep_copy,
    )
}


def result(way: str, model: nn.Module) -> list[float]:
    """What a program sees on its way, and what it leaves in the model."""
    found = WAYS[way](model)
    return [*found, trained(model, adam(model), 7), *values(model)]
