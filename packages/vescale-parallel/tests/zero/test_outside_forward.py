"""What touches stored parameters and gradients outside of the forward does what one device does.

Stored parameters lie on another spelling of the mesh than activations: (tp, dp) for (dp, tp).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from vescale_comm import simulate
from vescale_dtensor import DTensor
from vescale_parallel import Plan, mesh, parallelize

RULES = {
    "blocks.*.0.*": "tp:0",
    "blocks.*.2.weight": "tp:1",
    "head.*": "tp:0",
    "*": "replicate",
}


class Net(nn.Module):
    """Blocks between a table and a head, and a parameter that only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 7), nn.GELU(), nn.Linear(7, 8)) for _ in range(2)]
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, tokens: Tensor, whole: bool = True) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        hidden = self.norm(hidden)
        return self.head(hidden) if whole else hidden


TOKENS = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(5))


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), TOKENS.roll(1, 1).flatten())


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters after a backward, but for those without a gradient."""
    loss_of(model(TOKENS)).backward()
    return [p for p in model.parameters() if p.grad is not None]


def number(model: nn.Module) -> Tensor:
    return model(TOKENS).detach().square().mean()


def gradients_divided(model):
    for p in trained(model):
        p.grad.div_(number(model))


def gradients_set(model):
    for p in trained(model):
        p.grad = number(model) * p.grad


def gradients_in_a_list(model):
    torch._foreach_mul_([p.grad for p in trained(model)], number(model))


def gradients_clipped(model):
    held = trained(model)
    norm = torch.stack([p.grad.norm() for p in held]).norm()
    for p in held:
        p.grad.mul_(torch.clamp(number(model) / (norm + 1e-6), max=1.0))


def hooks(model):
    scale = number(model)
    held = [p.register_hook(lambda grad: scale * grad) for p in model.parameters()]
    trained(model)
    for one in held:
        one.remove()


def temperature(model):
    (loss_of(model(TOKENS) / model.temperature.exp()) + model.temperature**2).backward()


def penalty(model):
    extra = 1e-3 * sum(p.square().sum() for p in model.parameters())
    (loss_of(model(TOKENS)) + extra).backward()


def penalty_first(model):
    extra = 1e-3 * sum(p.square().sum() for p in model.parameters())
    extra += loss_of(model(TOKENS))
    extra.backward()


def head_alone(model):
    loss_of(model.head(model.norm(model(TOKENS, whole=False)))).backward()


def block_alone(model):
    hidden = model.blocks[0](model(TOKENS, whole=False))
    loss_of(checkpoint(model.head, hidden, use_reentrant=False)).backward()


def tied(model):
    hidden = model(TOKENS, whole=False)
    picked = model.embed(hidden.argmax(-1))
    loss_of((hidden + picked) @ model.embed.weight.t()).backward()


def functions(model):
    hidden = model(TOKENS, whole=False)
    row = F.layer_norm(hidden, (8,), model.norm.weight, model.norm.bias).mean((0, 1))
    near = F.cosine_similarity(row, model.norm.weight, dim=0)
    far = torch.cdist(hidden[:, 0], model.embed.weight).sum()
    logits = F.linear(hidden, model.head.weight, model.head.bias)
    parts = [logits.flatten(), model.head.bias, torch.where(row > 0, model.temperature, row)]
    (torch.cat(parts).square().mean() + near + far).backward()


def indices(model):
    chosen = model(TOKENS).argmax(-1)
    picked = model.embed.weight[chosen].sum()
    (picked + model.head.bias.gather(0, chosen.flatten()).sum()).backward()


@torch.no_grad()
def written(model):
    row = model(TOKENS).mean((0, 1))
    model.head.bias.copy_(row).lerp_(row.sigmoid(), 0.3)
    model.head.bias[2:4] = row[0]
    model.head.weight[0] = row[1]
    model.norm.bias.data = model(TOKENS, whole=False).mean((0, 1))
    torch.mul(model.norm.weight, row[2], out=model.norm.weight)
    for p in model.parameters():
        p.data -= row[3] * 1e-2


def averaged(model):
    held, rate = list(model.parameters()), number(model).sigmoid()
    means = [p.detach().clone().mul_(rate) for p in held]
    with torch.no_grad():
        for mean, p in zip(means, held, strict=True):
            p.copy_(mean.add_(p * (1 - rate)))


def gradient_given(model):
    logits = model(TOKENS)
    held = list(model.head.parameters())
    found = torch.autograd.grad(logits, held, grad_outputs=logits.detach() * model.temperature.data)
    for p, grad in zip(held, found, strict=True):
        p.grad = grad


LISTED = [gradients_divided, gradients_set, gradients_in_a_list, gradients_clipped, hooks]
LISTED += [temperature, penalty, penalty_first, head_alone, block_alone, tied, functions]
LISTED += [indices, written, averaged, gradient_given]
PROGRAMS: dict[str, Callable[[nn.Module], None]] = {f.__name__: f for f in LISTED}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def outcome(program: Callable[[nn.Module], None], plan: Plan | None) -> dict[str, Tensor]:
    """Parameters and gradients after the program, twice: the second time calls are known."""
    torch.manual_seed(0)
    model = Net()
    if plan is not None:
        parallelize(model, mesh(dp=2, tp=2, device_type="cpu"), plan)
    for _ in range(2):
        program(model)
    found = dict(model.named_parameters())
    found |= {f"{n} grad": p.grad for n, p in found.items() if p.grad is not None}
    return {name: whole(tensor) for name, tensor in found.items()}


def compare(names: list[str], level: int) -> None:
    expected = {name: outcome(PROGRAMS[name], None) for name in names}
    plan = Plan(parameters=RULES, batch="dp:0", zero=level)

    def body(rank: int, world_size: int) -> None:
        for name in names:
            found = outcome(PROGRAMS[name], plan)
            assert found.keys() == expected[name].keys(), name
            torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-5)

    simulate(4).run(body)


def test_programs():
    compare(["gradients_divided", "temperature", "penalty", "head_alone"], 3)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program(name, level):
    compare([name], level)
