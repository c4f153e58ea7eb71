"""A small decoder, its plan, batches, and one device's training: what ZeRO is compared with."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from vescale_dtensor import DTensor
from vescale_parallel import Plan, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel._zero.schedule import Schedule, zero_schedule_of

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Mlp(nn.Module):
    """Up, gate by a scalar, down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(x)) * self.gain)


class Block(nn.Module):
    """A residual layer; `inside` checkpoints its MLP, or all that its forward does ("all")."""

    def __init__(self, width: int, inside: bool | str | None = None) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.mlp = Mlp(width)
        self.dropout = nn.Dropout(0.1)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        def hidden(x: Tensor) -> Tensor:
            return self.mlp(self.norm(x))

        if self.inside is None:
            return x + self.dropout(hidden(x))
        if self.inside == "all":
            return checkpoint(lambda x: x + self.dropout(hidden(x)), x, use_reentrant=True)
        return x + self.dropout(checkpoint(hidden, x, use_reentrant=self.inside))


class Decoder(nn.Module):
    """Embedding, blocks, norm, head; `around` checkpoints whole blocks."""

    def __init__(
        self,
        *,
        tied: bool = True,
        blocks: int = 3,
        width: int = 12,
        vocabulary: int = 16,
        inside: bool | str | None = None,
        around: bool | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.blocks = nn.ModuleList(Block(width, inside) for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(8), nn.Linear(8, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.around = around

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            again = self.around
            x = block(x) if again is None else checkpoint(block, x, use_reentrant=again)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


PARAMETERS = {
    "{embed,head}.weight": "tp:0",
    "*.up.*": "tp:0",
    "*.down.weight": "tp:1",
    "*": "replicate",
}
SEQUENCE_PARALLEL = {"embed": "-> tp:1", "blocks.*.mlp": "tp:full -> tp:1", "head": "tp:full ->"}


def plan_for(sizes: Mapping[str, int], zero: Any = 3, **words: Any) -> Plan:
    """The decoder's plan on a mesh of these sizes; `words` are those of `Plan.with_`."""
    batch = "replica:0, dp:0" if "replica" in sizes else "dp:0"
    known: dict[str, Any] = {
        "parameters": PARAMETERS,
        "activations": SEQUENCE_PARALLEL,
        "batch": batch,
        "axes": ("replica", "dp", "tp"),
        "zero": zero,
    }
    return Plan(**known).with_(**words)


def make(seed: int = 0, **options: Any) -> Decoder:
    """The decoder with the values of a seed."""
    torch.manual_seed(seed)
    return Decoder(**options)


def distributed(model: nn.Module, sizes: Mapping[str, int], zero: Any = 3, **words: Any) -> Any:
    """The model, parallelised over a mesh of these sizes."""
    return parallelize(model, make_mesh(device_type="cpu", **sizes), plan_for(sizes, zero, **words))


def batch(step: int, vocabulary: int = 16) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one step: seven rows of five tokens."""
    generator = torch.Generator().manual_seed(step)
    pieces = torch.randint(vocabulary, (7, 6), generator=generator)
    return pieces[:, :-1], pieces[:, 1:]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The usual optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(model: nn.Module, steps: int, make_optimizer: MakeOptimizer = adamw) -> list[float]:
    """Losses and gradient norms of some steps; dropout draws the same numbers for all models."""
    optimizer = make_optimizer(model.parameters())
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(100 + step)
        loss = model(*batch(step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found += [loss.item(), norm.item()]
    return found


def whole(tensor: Tensor) -> Tensor:
    """The global value."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The global gradients by name."""
    found = {name: one.grad for name, one in model.named_parameters()}
    return {name: None if g is None else whole(g).detach() for name, g in found.items()}


def require_same_gradients(found: nn.Module, expected: nn.Module) -> None:
    """Both models hold the same gradients, and None in the same places."""
    one, two = gradients(found), gradients(expected)
    assert {n for n, g in one.items() if g is None} == {n for n, g in two.items() if g is None}
    for name, gradient in two.items():
        if gradient is not None:
            torch.testing.assert_close(
                one[name], gradient, rtol=2e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


def require_same_values(found: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    """Both models hold the same parameters."""
    pairs = zip(found.named_parameters(), expected.parameters(), strict=True)
    for (name, one), two in pairs:
        message = {"msg": lambda m, n=name: f"{n}: {m}"}
        torch.testing.assert_close(whole(one.detach()), two.detach(), **tolerance, **message)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same(ones: Any, twos: Any) -> None:
    """Assert that this rank holds the same bits of both; None beside None."""
    for one, two in zip(ones, twos, strict=True):
        assert (one is None) == (two is None)
        assert one is None or torch.equal(local(one), local(two))


def require_alike(models: Any) -> None:
    """Both models hold the same bits of parameters and of gradients."""
    # Of aliases: parameters whose own local tensors are handed out are gathered one by one.
    same(*([one.detach() for one in model.parameters()] for model in models))
    same(*([one.grad for one in model.parameters()] for model in models))


def backward(model: nn.Module, step: int = 0, **options: Any) -> Tensor:
    """Forward and backward of one batch; returns the loss."""
    torch.manual_seed(step)
    loss: Tensor = model(*batch(step))
    loss.backward(**options)
    return loss


def train_alike(models: Any, step: Callable[[Any, int], Any], steps: int = 4) -> list[list[Any]]:
    """Train models beside each other: the same bits at each step; returns what `step` does."""
    optimizers = [adamw(one.parameters()) for one in models]
    found = []
    for seed in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        found.append([step(model, seed) for model in models])
        require_alike(models)
        for optimizer in optimizers:
            optimizer.step()
    require_alike(models)
    return found


def schedule_of(model: nn.Module) -> Schedule:
    """The schedule of a parallelised model."""
    schedule = zero_schedule_of(model)
    assert schedule is not None
    return schedule


def train_scaled(
    model: nn.Module, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, steps: int
) -> list[float]:
    """Steps with a loss scale, clipped by value; returns the scale after each."""
    scales = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        scaler.scale(model(*batch(step))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales
