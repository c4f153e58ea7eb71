"""The models that are trained, their plans, and how a training is compared with one device's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS, ROWS, TOKENS, BLOCKS, STEPS = 16, 24, 8, 8, 4, 3


class Block(nn.Module):
    """A residual layer with dropout; with `attention`, causal attention before it."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH) if attention else None
        self.out = nn.Linear(WIDTH, WIDTH) if attention else None

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width] to the same."""
        if self.qkv is not None and self.out is not None:
            parts = self.qkv(self.norm(x)).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (4, WIDTH // 4)).transpose(1, 2) for part in parts)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
        dropped: Tensor = self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return x + dropped


class Decoder(nn.Module):
    """Embedding, blocks, norm, head, and the loss."""

    def __init__(self, attention: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of tokens [rows, tokens]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class WithExperts(nn.Module):
    """A table, two layers of experts with the loss of their routers, a head."""

    def __init__(self) -> None:
        from vescale_parallel import MoE

        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(MoE(WIDTH, 24, experts=6, top_k=2, shared=20) for _ in "12")
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy, and the routers' losses."""
        from vescale_parallel import balance_loss

        x: Any = self.embed(tokens)
        extra: Any = 0
        for block in self.blocks:
            out, routing = block(x, with_routing=True)
            x, extra = x + out, extra + 0.01 * balance_loss(routing)
        loss: Tensor = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()) + extra
        return loss


TENSOR: Final = {
    "{embed,head}.weight": "tp:0",
    "*.{up,qkv}.*": "tp:0",
    "*.{down,out}.weight": "tp:1",
    "*": "replicate",
}
NO_QKV: Final = {
    "{embed,head}.weight": "tp:0", "*.up.*": "tp:0", "*.down.weight": "tp:1", "*": "replicate",
}  # fmt: skip
SEQUENCE: Final = {"embed": "-> tp:1", "blocks.*.up": "tp:full ->", "head": "tp:full ->"}
EXPERTS: Final = {"*.gate_up_proj": "tp:1", "*.down_proj": "tp:2", "*": "replicate"}


@dataclass(frozen=True)
class Training:
    """A layout that is trained.

    Attributes:
        sizes: of the mesh, by axis.
        words: of the plan.
        model: "plain", "attention" or "experts".
        static: whether steps are recorded.
        microbatches: as which one device adds up the batch, if by stages.
    """

    sizes: Mapping[str, int]
    words: Mapping[str, Any] = field(default_factory=dict)
    model: str = "plain"
    static: bool = False
    microbatches: int = 0

    @property
    def ranks(self) -> int:
        """How many ranks the mesh has."""
        number = 1
        for size in self.sizes.values():
            number *= size
        return number


def _plain(zero: int = 0, **words: Any) -> dict[str, Any]:
    return {"zero": zero, "batch": "dp:0", **words}


def _tp(zero: int = 0, **words: Any) -> dict[str, Any]:
    return _plain(zero, axes=("dp", "tp"), parameters=NO_QKV, **words)


def _stages(schedule: str, **words: Any) -> dict[str, Any]:
    return {"stages": "blocks.*", "schedule": schedule, "microbatches": 4, **words}


TRAININGS: Final[dict[str, Training]] = {
    "dp=2": Training({"dp": 2}, _plain()),
    "tp=2": Training({"dp": 1, "tp": 2}, _tp()),
    "dp=2 zero 3": Training({"dp": 2}, _plain(3)),
    "tp=2 sequence parallel": Training({"dp": 1, "tp": 2}, _tp(activations=SEQUENCE)),
    "pp=2 1f1b": Training({"pp": 2}, _stages("1f1b"), microbatches=4),
    "cp=2": Training({"dp": 1, "cp": 2}, {"batch": "dp:0, cp:1"}, "attention"),
    "ep=2": Training({"ep": 2}, {"batch": "ep:0", "experts": "ep"}, "experts"),
    "dp=2 zero 1": Training({"dp": 2}, _plain(1)),
    "dp=2 zero 2": Training({"dp": 2}, _plain(2)),
    "dp=2 tp=2 zero 3, sequence parallel": Training(
        {"dp": 2, "tp": 2}, _tp(3, activations=SEQUENCE)
    ),
    "pp=2 dp=2 zero 2": Training(
        {"pp": 2, "dp": 2}, _stages("1f1b", zero=2, batch="dp:0"), microbatches=4
    ),
    "dp=2 static": Training({"dp": 2}, _plain(), static=True),
    "dp=2 zero 3 static": Training({"dp": 2}, _plain(3), static=True),
    "dp=2 cp=2 zero 3": Training(
        {"dp": 2, "cp": 2}, {"batch": "dp:0, cp:1", "zero": 3}, "attention"
    ),
    "ep=2 dp=2": Training(
        {"dp": 2, "ep": 2}, {"batch": "dp:0, ep:0", "experts": "ep"}, "experts"
    ),
    "pp=2 dp=2 tp=2": Training(
        {"pp": 2, "dp": 2, "tp": 2},
        _stages("1f1b", batch="dp:0", parameters=NO_QKV), microbatches=4,
    ),
    "dp=2 cp=2 tp=2": Training(
        {"dp": 2, "cp": 2, "tp": 2},
        {"batch": "dp:0, cp:1", "parameters": NO_QKV}, "attention",
    ),
    "dp=4 tp=2 zero 3": Training({"dp": 4, "tp": 2}, _tp(3)),
    "cp=2 ring": Training(
        {"dp": 1, "cp": 2}, {"batch": "dp:0, cp:1", "sequence": "ring"}, "attention"
    ),
    "cp=2 gather": Training(
        {"dp": 1, "cp": 2}, {"batch": "dp:0, cp:1", "sequence": "gather"}, "attention"
    ),
    "dp=2 checkpoint": Training({"dp": 2}, _plain(3, checkpoint="full")),
    "pp=2 zb-h1": Training({"pp": 2}, _stages("zb-h1"), microbatches=4),
    "pp=2 interleaved": Training({"pp": 2}, _stages("interleaved"), microbatches=4),
    "ep=2 tp=2": Training(
        {"ep": 2, "tp": 2},
        {"batch": "ep:0", "experts": "ep", "parameters": EXPERTS}, "experts",
    ),
    "dp=2 ep=2 zero 3": Training(
        {"dp": 2, "ep": 2}, {"batch": "dp:0, ep:0", "experts": "ep", "zero": 3}, "experts"
    ),
    "dp=8 zero 3": Training({"dp": 8}, _plain(3)),
    "pp=4 dp=2 zero 1": Training(
        {"pp": 4, "dp": 2}, _stages("1f1b", zero=1, batch="dp:0"), microbatches=4
    ),
}  # fmt: skip
"""In the order in which they are tried: one of each kind, then their products."""


def built(kind: str, device: torch.device) -> nn.Module:
    """A model with the values of one seed, which do not depend on the device."""
    torch.manual_seed(0)
    made = WithExperts() if kind == "experts" else Decoder(attention=kind == "attention")
    return made.to(device)


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one step, alike on every device."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (ROWS, TOKENS + 1), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def whole(tensor: Any) -> Tensor:
    """The global value."""
    from vescale_dtensor import DTensor

    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def parallelised(training: Training, device: torch.device) -> nn.Module:
    """The model over a mesh; called on every rank."""
    from vescale_parallel import Plan, mesh, parallelize

    here = mesh(device_type=device.type, **training.sizes)
    # What is to lie on the host is built there.
    at = torch.device("cpu") if training.words.get("offload") else device
    model = built(training.model, at)
    return parallelize(model, here, Plan().with_(**training.words), static=training.static)


Step = Callable[[nn.Module, Tensor, Tensor], Tensor]


def one_device(training: Training) -> Step:
    """Forward and backward on one device; by microbatches where stages add them up."""
    if not training.microbatches:
        return eager
    return lambda *given: _accumulated(training.microbatches, *given)


def step_of(training: Training) -> Step:
    """Forward and backward of a parallelised model."""
    from vescale_parallel import forward_backward

    if not training.microbatches:
        return eager
    return lambda model, tokens, targets: forward_backward(model, tokens, targets)


def eager(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Forward and backward."""
    loss: Tensor = model(tokens, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def _accumulated(parts: int, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    pieces = zip(tokens.chunk(parts), targets.chunk(parts), strict=True)
    losses = []
    for piece in pieces:
        loss = model(*piece) / parts
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def train(
    model: nn.Module, step: Step, device: torch.device, steps: int = STEPS
) -> dict[str, Tensor]:
    """Losses, gradient norms and parameters after some steps; dropout draws what a seed says."""
    # Plain SGD: what sums in another order change stays as small as it is.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = {}
    for at in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(100 + at)
        loss = step(model, *batch(at, device))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found[f"loss {at}"], found[f"norm {at}"] = whole(loss), whole(norm)
    for name, one in model.named_parameters():
        found[name] = whole(one)
    found["host's generator"] = torch.get_rng_state()
    if device.type == "cuda":
        found["device's generator"] = torch.cuda.get_rng_state(device)
    return found
