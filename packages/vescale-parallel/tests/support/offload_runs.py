"""Runs of the decoder with `offload`, on any device, beside the same plan without it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_parallel import no_sync, parallelize
from zero_models import adamw, batch, make, plan_for, whole

HALF = {"compute": "bfloat16", "reduce": "float32"}


def built(mesh: DeviceMesh, zero: Any, **words: Any) -> Any:
    """The decoder on a mesh. With `offload` it is built on the host, else on the device."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True))
    model = make()
    if mesh.device_type not in ("cpu", "cuda"):
        for block in model.blocks:
            block.dropout = nn.Identity()  # random numbers are drawn on those two
    if not words.get("offload"):
        model = model.to(mesh.device_type)
        # Moving to some devices makes new parameters.
        model.head.weight = model.embed.weight
    static = words.pop("static", False)
    return parallelize(model, mesh, plan_for(sizes, zero, **words), static=static)


def backward(model: nn.Module, step: int, scale: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """Forward and backward of one batch."""
    device = device_of(model)
    torch.manual_seed(step)
    scale(model(*[one.to(device) for one in batch(step)])).backward()


def device_of(model: Any) -> str:
    """Where the model computes."""
    return model.blocks[0].mlp.gain.device.type


def stepped(model: nn.Module, scale: Any = None) -> None:
    """Three steps, clipped."""
    optimizer = adamw(model.parameters())
    for step in range(3):
        backward(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def accumulated(model: nn.Module) -> None:
    """Gradients of several backwards, reduced once; one of them dropped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        with no_sync(model):
            backward(model, step + 10)
            optimizer.zero_grad()
            backward(model, step)
        backward(model, step + 1)
        optimizer.step()
        optimizer.zero_grad()
    with no_sync(model):
        backward(model, 5)
    optimizer.step()


def scaled(model: nn.Module) -> None:
    """With a loss scale, of which the first step overflows."""
    optimizer = adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    for step in range(4):
        backward(model, step, scaler.scale)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update(2.0**8 if step == 0 else None)
        optimizer.zero_grad()


def copied(model: nn.Module) -> None:
    """A copy trains by itself, takes the state of the first, and gives it back."""
    stepped(model)
    twin = copy.deepcopy(model)
    stepped(twin)
    model.load_state_dict(twin.state_dict())
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(one), whole(other))
    backward(model, 9)
    model.eval()
    with torch.no_grad():
        model(*[one.to(device_of(model)) for one in batch(1)])
    for parameter in model.parameters():
        parameter.grad = None
    model.train()
    stepped(model)


RUNS = {one.__name__: one for one in (stepped, accumulated, scaled, copied)}


def alike(mesh: DeviceMesh, zero: Any, run: str, words: dict[str, Any]) -> Any:
    """Train with and without `offload`: the same bits. Returns the offloaded model."""
    plain = {name: one for name, one in words.items() if name != "offload"}
    expected, found = built(mesh, zero, **plain), built(mesh, zero, **words)
    for model in (expected, found):
        RUNS[run](model)
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        # Global values: which rank stores which elements may differ.
        one, other = (whole(each.detach()).to("cpu") for each in (one, other))
        assert torch.equal(one, other), (name, (one - other).abs().max())
    return found
