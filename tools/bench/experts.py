"""A training step of layers of experts: tokens that move, padded dispatch, experts on every rank.

Three variants train the same layers on the same batches in the same gloo processes of one thread
each, and take turns; before anything is timed their losses of the first steps must be those of one
plain device within 1e-5.

- ours: `Plan(experts="ep")`, exactly the rows that move;
- padded: by hand, dense dispatch into a slot for each expert, as long as the longest on any rank,
  one all-to-all of equal parts each way, batched products, the router's gradient summed in one;
- replicated: the same plan without the word: every rank holds all experts, gradients are summed.

    nox -s bench -- experts
    nox -s bench -- experts --width 128 256 --experts 16 --skew 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from vescale_comm import SplitSizes, all_reduce, all_to_all_single, as_group, trace
from vescale_comm.testing import run
from vescale_parallel import MoE, Plan, parallelize

from tools.bench import Ratio, in_turn
from tools.bench._train.memory import peak_of, storages_now
from tools.bench._train.ranks import require_alike

OURS, PADDED, REPLICATED = "ours", "padded, by hand", "replicated"
CHECKED = 3


@dataclass(frozen=True)
class Job:
    """What is run: `skew` is the standard deviation of a bias of the routers' inputs."""

    width: int
    experts: int
    k: int
    layers: int
    tokens: int
    skew: float
    rounds: int


@dataclass
class VariantResult:
    """What a variant took on one rank."""

    losses: list[float]
    sent: int = 0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)


class Layers(nn.Module):
    """Residual layers of experts."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MoE(job.width, 2 * job.width, job.experts, job.k) for _ in range(job.layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The layers, one after another."""
        for layer in self.layers:
            x = x + layer(x)
        return x


class Padded(nn.Module):
    """One layer by hand: plain tensors of this rank, slots of equal length for every expert."""

    def __init__(self, whole: MoE, k: int) -> None:
        super().__init__()
        self.group, self.k = as_group(None), k
        self.router = nn.Parameter(whole.router.weight.detach().clone())
        own = whole.experts.num_experts // self.group.size
        mine = slice(own * self.group.rank, own * (self.group.rank + 1))
        self.gate_up = nn.Parameter(whole.experts.gate_up_proj.detach()[mine].clone())
        self.down = nn.Parameter(whole.experts.down_proj.detach()[mine].clone())

    def forward(self, x: Tensor) -> Tensor:
        """Route, send slots, compute, send back, add up."""
        weights, chosen = functional.linear(x, self.router).softmax(-1).topk(self.k)
        weights = (weights / weights.sum(-1, keepdim=True)).reshape(-1, 1)
        count = self.router.shape[0]
        hot = functional.one_hot(chosen.reshape(-1), count)
        place = ((hot.cumsum(0) - hot) * hot).sum(-1)
        length = int(all_reduce(hot.sum(0).max(), self.group, op="max"))
        slot = chosen.reshape(-1) * length + place
        sent = x.new_zeros(count * length, x.shape[1])
        sent = sent.index_copy(0, slot, x.repeat_interleave(self.k, 0))
        got = self._exchanged(sent).view(self.group.size, -1, length, x.shape[1])
        rows = got.transpose(0, 1).flatten(1, 2)
        gate, up = torch.bmm(rows, self.gate_up.mT).chunk(2, -1)
        said = torch.bmm(functional.silu(gate) * up, self.down.mT)
        said = said.view(-1, self.group.size, length, x.shape[1]).transpose(0, 1)
        back = self._exchanged(said.reshape(sent.shape))
        return (back[slot] * weights).view(*chosen.shape, -1).sum(1)

    def _exchanged(self, x: Tensor) -> Tensor:
        part = x.numel() // self.group.size
        sizes = SplitSizes([part] * self.group.size, [part] * self.group.size)
        return all_to_all_single(x.reshape(-1), self.group, sizes=sizes).view(x.shape)


class Variant:
    """A model on this rank and its optimizer."""

    def __init__(self, name: str, job: Job) -> None:
        torch.manual_seed(0)
        model: Any = Layers(job)
        self.by_hand = name == PADDED
        if self.by_hand:
            layers = [Padded(one, job.k) for one in model.layers]
            model.layers = nn.ModuleList(layers)
            self.shared = [one.router for one in layers]
        elif name != "one device":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
            over = "ep" if name == OURS else None
            parallelize(model, mesh, Plan(batch="ep:0", experts=over))
        self.model, self.name = model, name
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step(self, x: Tensor, target: Tensor) -> Tensor:
        """One training step; returns the loss."""
        self.optimizer.zero_grad()
        if self.by_hand:
            world, rank = dist.get_world_size(), dist.get_rank()
            own = self.model(x.chunk(world)[rank])
            loss = (own - target.chunk(world)[rank]).square().sum() / x.numel()
            loss.backward()
            self._sum_shared()
        else:
            loss = (self.model(x) - target).square().mean()
            loss.backward()
        self.optimizer.step()
        found: Tensor = loss.detach()
        return found

    def _sum_shared(self) -> None:
        gradients: list[Any] = [one.grad for one in self.shared]
        flat = all_reduce(torch.cat([one.flatten() for one in gradients]))
        parts = torch.split(flat, [one.numel() for one in self.shared])
        for one, part in zip(gradients, parts, strict=True):
            one.copy_(part.view_as(one))

    def value(self, loss: Tensor) -> float:
        """The loss of the whole batch."""
        return float(all_reduce(loss)) if self.by_hand else loss.item()


def batch_of(job: Job, step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step."""
    generator = torch.Generator().manual_seed(step)
    bias = torch.randn(job.width, generator=torch.Generator().manual_seed(99)) * job.skew
    x = torch.randn(job.tokens, job.width, generator=generator) + bias
    return x, torch.randn(job.tokens, job.width, generator=generator)


def compare(rank: int, world_size: int, job: Job) -> dict[str, VariantResult]:
    """Measure every variant of the job on this rank."""
    torch.set_num_threads(1)
    alone = Variant("one device", job)
    expected = [float(alone.step(*batch_of(job, step))) for step in range(CHECKED)]
    variants, found = {}, {}
    batch = batch_of(job, CHECKED)
    for name in (OURS, PADDED, REPLICATED):
        others = storages_now()
        one = variants[name] = Variant(name, job)
        losses = [one.value(one.step(*batch_of(job, step))) for step in range(CHECKED)]
        require_alike(name, losses, expected)
        with trace() as sent:
            one.step(*batch)
        peak = peak_of(one, batch, others)  # type: ignore[arg-type]
        found[name] = VariantResult(losses, sum(each.bytes for each in sent.records), peak.total)
    for turn in range(job.rounds + 1):
        for name in in_turn(variants, turn):
            one = variants[name]
            one.step(*batch)  # after another variant's turn nothing is in the caches
            dist.barrier()
            start = time.perf_counter()
            for _ in range(3):
                one.step(*batch)
            dist.barrier()
            found[name].seconds.append((time.perf_counter() - start) / 3)
    return found


def parser() -> argparse.ArgumentParser:
    """The options of this benchmark."""
    made = argparse.ArgumentParser(
        prog="nox -s bench -- experts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--ranks", type=int, default=2, help="default: 2")
    add("--width", nargs="+", type=int, default=[64, 256], help="default: 64 256")
    add("--experts", type=int, default=8, help="a multiple of the ranks (default: 8)")
    add("--k", type=int, default=2, help="experts of a token (default: 2)")
    add("--layers", type=int, default=2, help="default: 2")
    add("--tokens", type=int, default=1024, help="of the whole batch (default: 1024)")
    add("--skew", type=float, default=0.5, help="how uneven the load is (default: 0.5)")
    add("--rounds", type=int, default=7, help="turns of each variant (default: 7)")
    return made


def measure(
    ranks: int = 2, width: Sequence[int] = (64, 256), rounds: int = 7, **words: Any
) -> Iterator[Ratio]:
    """Ours against both others, width by width."""
    words = {"experts": 8, "k": 2, "layers": 2, "tokens": 1024, "skew": 0.5} | words
    for one in width:
        found = run(compare, ranks, Job(width=one, rounds=rounds, **words), timeout=600)
        case = f"width {one}, {words['experts']} experts"
        for other in (PADDED, REPLICATED):
            times = [statistics.median(found[0][name].seconds[1:]) for name in (OURS, other)]
            yield Ratio(f"{case}: step", times[0] * 1e3, times[1] * 1e3, "ms", other, 1.0)
            sent = [sum(rank[name].sent for rank in found) / 1e6 for name in (OURS, other)]
            yield Ratio(f"{case}: sent", sent[0], sent[1], "MB", other, 1.0)
            peaks = [max(rank[name].peak for rank in found) / 1e6 for name in (OURS, other)]
            yield Ratio(f"{case}: peak", peaks[0], peaks[1], "MB", other, 1.0)
