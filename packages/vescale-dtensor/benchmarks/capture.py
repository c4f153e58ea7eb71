"""What a captured training step costs: a Llama-style model of hidden size 64 over dp=4 x tp=2.

Forward and backward, one thread, a world of 8 whose process group is torch's fake one: what is
measured is the work around the arithmetic, so collectives count as free. The captured step is
compared with the same step written by hand (a module of plain local tensors, with autograd nodes
that place Megatron's collectives), with eager DTensors, and with one device on as many rows; and
what the call that records costs, with an eager call. For models of 1, 4, 16 and 64 blocks. And what
3,000 steps cost whose batches have another length again and again, the recordings among them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import thread_time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from vescale_dtensor import Replicate, Shard

from tools.bench import Ratio
from tools.bench._timing import microseconds, microseconds_once

ROWS, LENGTH, HIDDEN, HEADS, INNER, TP, DP = 2, 32, 64, 4, 128, 2, 4
ROUNDS, TURNS, LAYERS = 15, 8, 4
DEPTHS = (1, 16, 64)
# Of each depth: deep models take long, and differ less from round to round.
FEWER_ROUNDS, RECORDINGS = 7, 5
# Few lengths; as many as programs are kept, at first; and more, of which none comes often enough.
LENGTHS, STEPS = (8, 33, 100), 3000
Step = Callable[[], object]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), self.weight)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def table() -> tuple[Tensor, Tensor]:
    size = HIDDEN // HEADS
    frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(LENGTH), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    def __init__(self, shards: int = 1) -> None:
        super().__init__()
        for name in "qkv":
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN // shards, bias=False))
        self.o = nn.Linear(HIDDEN // shards, HIDDEN, bias=False)
        cos, sin = table()
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(part(x)) for part in (self.q, self.k, self.v))
        q, k = turned(q, self.cos, self.sin), turned(k, self.cos, self.sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, shards: int = 1) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INNER // shards, bias=False)
        self.up = nn.Linear(HIDDEN, INNER // shards, bias=False)
        self.down = nn.Linear(INNER // shards, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """The model as one writes it for one device."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class _Spread(torch.autograd.Function):
    """Into a region that is split over tp: gradients are summed on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Summed(torch.autograd.Function):
    """Out of such a region: terms are summed on the way forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class BlockByHand(nn.Module):
    """One rank's shard of the model, with its collectives."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.attention, self.mlp = Attention(TP), Mlp(TP)
        self.group = group

    def split(self, part: nn.Module, x: Tensor) -> Tensor:
        return _Summed.apply(part(_Spread.apply(x, self.group)), self.group)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.split(self.attention, self.norms[0](x))
        return x + self.split(self.mlp, self.norms[1](x))


def distributed(mesh: vd.DeviceMesh, layers: int = LAYERS) -> nn.Module:
    model = stack(Block, layers)
    sharded = {"q": 0, "k": 0, "v": 0, "gate": 0, "up": 0, "o": 1, "down": 1}
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        dim = sharded.get(owner.rpartition(".")[2])
        layout = [Replicate(), Replicate() if dim is None else Shard(dim)]
        whole = vd.distribute_tensor(parameter.detach(), mesh, layout, src_data_rank=None)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(whole))
    return vd.distribute_module(model, mesh)


def stack(block: Callable[[], nn.Module], layers: int = LAYERS) -> nn.Module:
    return nn.Sequential(*(block() for _ in range(layers)))


def training(model: nn.Module, x: Tensor, wrap: Callable[[Step], Step] = lambda step: step) -> Step:
    """Forward and backward, from gradients that are None."""
    parameters, count = list(model.parameters()), math.prod(x.shape)

    def step() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        loss = model(x).square().sum() / count
        loss.backward()
        return loss.detach()

    return wrap(step)


def steps() -> dict[str, Step]:
    """One training step of each kind, by name."""
    mesh = vd.init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    rows = torch.randn(ROWS, LENGTH, HIDDEN)
    x = vd.DTensor.from_local(rows, mesh, [Shard(0), Replicate()])
    return {
        "captured": training(distributed(mesh), x, vd.capture),
        "by hand": training(stack(lambda: BlockByHand(mesh.get_group("tp"))), rows),
        "eager": training(distributed(mesh), x),
        "one device": training(stack(Block), rows),
    }


def repeated(step: Step, turns: int = TURNS) -> Step:
    """The step, many times over."""

    def run() -> None:
        for _ in range(turns):
            step()

    return run


def measure(rounds: int = ROUNDS, depths: Sequence[int] = DEPTHS) -> Iterator[Ratio]:
    """The captured step, and the eager one, against each of the others.

    Programs differ between coordinates of tp: where a replicated tensor joins a partial sum, the
    first takes it as it is, and the others take zeros.
    """
    torch.set_num_threads(1)
    cost = timed(0, rounds)
    for name in ("by hand", "eager", "one device"):
        goal = 1.05 if name == "by hand" else None
        yield Ratio("captured step", cost["captured"], cost[name], "us", name, goal)
    for name in ("by hand", "one device"):
        yield Ratio("eager step", cost["eager"], cost[name], "us", name)
    cost = timed(1, rounds)
    name = "by hand"
    yield Ratio("captured step, on rank 1", cost["captured"], cost[name], "us", name, 1.05)
    for layers in depths:
        cost = of_depth(layers, rounds if layers < LAYERS else min(rounds, FEWER_ROUNDS))
        blocks = f"{layers} block{'s' if layers > 1 else ''}"
        title = f"captured step, {blocks}"
        yield Ratio(title, cost["captured"], cost["by hand"], "us", "by hand", 1.05)
        yield Ratio(title, cost["captured"], cost["eager"], "us", "eager")
        yield Ratio(f"recording, {blocks}", cost["recording"], cost["eager"], "us", "eager", 20)
    for lengths in LENGTHS:
        captured, eager = of_lengths(lengths, STEPS if rounds == ROUNDS else STEPS // 100)
        yield Ratio(f"captured step, {lengths} lengths", captured, eager, "us", "eager", 1)


@contextmanager
def world(rank: int = 0) -> Iterator[None]:
    """A world whose process group sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=DP * TP)
    try:
        torch.manual_seed(0)
        yield
    finally:
        dist.destroy_process_group()


def of_depth(layers: int, rounds: int) -> dict[str, float]:
    """What steps of a model of so many blocks cost, and the call that records one."""
    with world():
        mesh = vd.init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
        rows = torch.randn(ROWS, LENGTH, HIDDEN)
        x = vd.DTensor.from_local(rows, mesh, [Shard(0), Replicate()])
        model, group = distributed(mesh, layers), mesh.get_group("tp")
        eager = training(model, x)
        calls = {
            "captured": training(distributed(mesh, layers), x, vd.capture),
            "by hand": training(stack(lambda: BlockByHand(group), layers), rows),
            "eager": eager,
        }
        # A short step, too, many times in a row, as `timed` says.
        turns = max(1, TURNS // layers)
        found = microseconds({n: repeated(s, turns) for n, s in calls.items()}, rounds=rounds)
        cost = {name: value / turns for name, value in found.items()}
        # Each of a captured function of its own: the first call of a kind is the one that records.
        fresh = [training(model, x, vd.capture) for _ in range(min(rounds, RECORDINGS))]
        return cost | microseconds_once({"recording": fresh}, {"recording": eager})


def of_lengths(lengths: int, steps: int) -> tuple[float, float]:
    """What a captured and an eager step of one block cost, where batches have many lengths."""
    with world(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what changes again and again
        mesh = vd.init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(Norm(), Mlp())
        model = vd.distribute_module(model, mesh)
        batches = [
            vd.DTensor.from_local(torch.randn(ROWS, length, HIDDEN), mesh, [Shard(0), Replicate()])
            for length in range(1, lengths + 1)
        ]

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        captured, cost = vd.capture(step), {True: 0.0, False: 0.0}
        for x in batches:
            step(x)  # plans, which both of them find
        for number in range(steps):
            # Step by step, so that what else the machine does slows both of them down; in turns, as
            # the second one finds the batch in the caches.
            x = batches[number * 7 % lengths]
            for run in (captured, step)[:: 1 if number % 2 else -1]:
                begin = thread_time()
                run(x)
                cost[run is captured] += thread_time() - begin
        return cost[True] / steps * 1e6, cost[False] / steps * 1e6


def timed(rank: int, rounds: int) -> dict[str, float]:
    """What each kind of step costs this rank, in microseconds."""
    with world(rank):
        # Many steps in a row: the first after another kind of step finds nothing in the caches.
        calls = {name: repeated(step) for name, step in steps().items()}
        return {k: v / TURNS for k, v in microseconds(calls, rounds=rounds).items()}
