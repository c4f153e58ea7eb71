"""A parallelised model trains like the plain one, keeps its structure, or is refused everywhere."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import vescale_dtensor
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from vescale_comm import trace
from vescale_comm.testing import Failed, on_ranks, outcomes, run
from vescale_dtensor import DTensor, Partial, Replicate, Shard
from vescale_parallel import Plan, parallelize
from vescale_parallel import mesh as make_mesh
from zero_models import whole


class Block(nn.Module):
    """A residual feed-forward layer with a norm; takes and gives nested values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.RMSNorm(8), nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, pair: tuple[Tensor, Tensor], *, options: dict[str, Any]) -> dict[str, Tensor]:
        x, scale = pair
        hidden = nn.functional.silu(self.up(self.norm(x))) * options["gain"]
        return {"out": x + self.down(hidden) * scale}


class Tied(nn.Module):
    """Embedding and head share their weight; a buffer scales the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.block = Block()
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.block((x, self.scale), options={"gain": 2.0})["out"]
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


PLAN = Plan(
    parameters={
        "{embed,head}.weight": "tp:0",
        "*.up.*": "tp:0",
        "*.down.weight": "tp:1",
        "*": "replicate",
    },
    activations={"embed": "-> tp:1", "block": "tp:full -> tp:1", "head": "tp:full ->"},
)
MESHES = [{"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 3}, {"dp": 1, "tp": 1}]


def tokens_and_targets() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    pieces = torch.randint(16, (5, 7), generator=generator)
    return pieces[:, :-1], pieces[:, 1:]


def make(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def train(model: nn.Module, steps: int, optimizer: torch.optim.Optimizer) -> list[float]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*tokens_and_targets())
        loss.backward()
        values += [loss.item(), clip_grad_norm_(model.parameters(), 0.1).item()]
        optimizer.step()
        scheduler.step()
    return values


def compare_training(rank: int, world_size: int, sizes: dict[str, int]) -> None:
    plain = make()
    parallel = parallelize(make(), make_mesh(device_type="cpu", **sizes), PLAN)
    expected, found = (
        train(one, 4, torch.optim.AdamW(one.parameters(), lr=1e-2)) for one in (plain, parallel)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for (name, one), two in zip(plain.named_parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(whole(two.detach()), one.detach(), msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_it_trains_like_one_device(sizes: dict[str, int]):
    run(compare_training, torch.Size(sizes.values()).numel(), sizes)


@on_ranks(4)
def test_structure_is_kept():
    plain = make()
    names = list(plain.state_dict())
    frozen = plain.block.norm.weight.requires_grad_(False)
    model = parallelize(plain, make_mesh(dp=2, tp=2, device_type="cpu"), PLAN)
    assert model is plain
    assert list(model.state_dict()) == names
    assert model.embed.weight is model.head.weight
    for parameter in model.parameters():
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor)
    assert not model.block.norm.weight.requires_grad
    assert model.block.norm.weight is not frozen
    assert model.block.up.weight.placements == (Replicate(), Shard(0))
    assert model.block.up.weight.to_local().shape == (6, 8)
    assert type(model.scale) is Tensor
    gathered = {name: whole(value) for name, value in model.state_dict().items()}
    for name, value in make().state_dict().items():
        assert torch.equal(gathered[name], value)


@on_ranks(4)
def test_boundaries_reach_into_nested_values():
    model = parallelize(make(), make_mesh(dp=2, tp=2, device_type="cpu"), PLAN)
    seen: dict[str, Any] = {}
    model.block.register_forward_hook(
        lambda m, args, kwargs, out: seen.update(into=args[0][0], scale=args[0][1], out=out["out"]),
        with_kwargs=True,
    )
    model(*tokens_and_targets())
    assert seen["into"].placements == (Shard(0), Replicate())
    assert seen["out"].placements == (Shard(0), Shard(1))
    assert type(seen["scale"]) is Tensor


def gradient_collectives(rank: int, world_size: int, activations: dict[str, str]) -> dict[str, int]:
    plan = dataclasses.replace(PLAN, activations=activations)
    model = parallelize(make(), make_mesh(dp=2, tp=2, device_type="cpu"), plan)
    model(*tokens_and_targets()).backward()
    assert not any(finished(p.grad) for p in model.parameters())
    with trace() as first:
        vescale_dtensor.gradient_total(next(model.parameters()))
    with trace() as later:
        for parameter in model.parameters():
            vescale_dtensor.gradient_total(parameter)
    assert later.counts() == {}
    return first.counts()


def finished(gradient: DTensor) -> bool:
    """Whether a gradient is finished: it owes no sum."""
    return not any(isinstance(placement, Partial) for placement in gradient.placements)


TRAVELS = [
    # The norm works on whole sequences: its gradient, as all others, owes a sum over dp only.
    ("tp:full", 1),
    # It works on pieces of sequences: it owes one over dp and tp.
    ("tp:1", 2),
]


@pytest.mark.parametrize(("norm_sees", "collectives"), TRAVELS)
def test_all_gradients_travel_in_one_collective_for_each_set_of_axes(
    norm_sees: str, collectives: int
):
    activations = {
        "embed": "-> tp:1",
        "block.norm": f"{norm_sees} -> tp:full",
        "head": "tp:full ->",
    }
    for counts in run(gradient_collectives, 4, activations):
        assert counts == {"all_reduce": collectives}


@on_ranks(4)
def test_gradients_reach_plain_inputs():
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    found = []
    for parallel in (False, True):
        torch.manual_seed(1)
        model: nn.Module = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        if parallel:
            plan = Plan(parameters={"0.*": "tp:0", "2.weight": "tp:1", "*": "replicate"})
            parallelize(model, make_mesh(dp=2, tp=2, device_type="cpu"), plan)
        given = x.clone().requires_grad_()
        model(given).square().sum().backward()
        found.append(given.grad)
    torch.testing.assert_close(found[1], found[0])


@on_ranks(4)
def test_copies_and_attributes():
    plain = make()
    plain.embed.weight.decay = False
    model = parallelize(plain, make_mesh(dp=2, tp=2, device_type="cpu"), PLAN)
    assert model.embed.weight.decay is False
    copied = copy.deepcopy(model)
    for one in (model, copied):
        one(*tokens_and_targets()).backward()
    for first, second in zip(model.parameters(), copied.parameters(), strict=True):
        assert first is not second
        assert torch.equal(first.grad.full_tensor(), second.grad.full_tensor())


def parallelize_twice(rank: int, world_size: int, inner: bool) -> None:
    here = make_mesh(dp=world_size, device_type="cpu")
    model = make()
    everything = Plan(parameters={"*": "replicate"})
    parallelize(model.block if inner else model, here, everything)
    parallelize(model, here, everything)


def seed_by_rank(rank: int, world_size: int) -> None:
    parallelize(make(seed=rank), make_mesh(dp=world_size, device_type="cpu"), PLAN)


def batch_by_rank(rank: int, world_size: int) -> None:
    model = parallelize(make(), make_mesh(dp=world_size, device_type="cpu"), PLAN)
    tokens, targets = tokens_and_targets()
    model(tokens.roll(rank, 0), targets)


def on_meta(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = make()
    parallelize(model, make_mesh(dp=world_size, device_type="cpu"), PLAN)


def with_gradients(rank: int, world_size: int) -> None:
    model = make()
    model(*tokens_and_targets()).backward()
    parallelize(model, make_mesh(dp=world_size, device_type="cpu"), PLAN)


def activation_without_dim(rank: int, world_size: int) -> None:
    plan = Plan(parameters={"*": "replicate"}, activations={"embed": "-> dp:3"})
    model = parallelize(make(), make_mesh(dp=world_size, device_type="cpu"), plan)
    model(*tokens_and_targets())


def bad_bucket(rank: int, world_size: int) -> None:
    parallelize(make(), make_mesh(dp=2, device_type="cpu"), PLAN, bucket_bytes=0)


def mesh_that_does_not_fit(rank: int, world_size: int) -> None:
    make_mesh(dp=3, tp=2, device_type="cpu")


REFUSALS: list[tuple[Callable[..., None], tuple[Any, ...], str, str]] = [
    (parallelize_twice, (False,), "PlanError", "parallelised already"),
    (parallelize_twice, (True,), "PlanError", "'block.norm.weight'"),
    (seed_by_rank, (), "DisagreementError", "torch.manual_seed"),
    (batch_by_rank, (), "DisagreementError", "args[0]"),
    (on_meta, (), "PlanError", "meta device"),
    (with_gradients, (), "PlanError", "zero_grad"),
    (activation_without_dim, (), "PlanError", "(5, 6, 8) leaves 'embed', and 'dp:3'"),
    (bad_bucket, (), "ValueError", "cap_bytes=0"),
    (mesh_that_does_not_fit, (), "MeshError", "dp=3, tp=2) needs 6"),
]


@pytest.mark.parametrize(("case", "args", "kind", "message"), REFUSALS)
def test_every_rank_refuses(
    case: Callable[..., None], args: tuple[Any, ...], kind: str, message: str
):
    for one in outcomes(case, 2, *args):
        assert isinstance(one, Failed)
        assert one.type_name.rpartition(".")[2] == kind
        assert message in one.message


@on_ranks(2)
def test_a_refusal_changes_nothing():
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="no rule covers"):
        parallelize(model, make_mesh(dp=2, device_type="cpu"), Plan(parameters={"head.*": "tp:0"}))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
