"""Forwards that write to their own parameters, beside one device: each way to write, to run, level.

Run as a script, it writes WRITES.md; tests compute its cells again and compare.
"""

import io
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from vescale_comm import simulate
from vescale_dtensor import DTensor
from vescale_parallel import Pipeline, Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh

FILE = Path(__file__).resolve().parents[2] / "WRITES.md"
ROWS = 8


def local(w: Tensor) -> Tensor:
    return w.to_local() if isinstance(w, DTensor) else w


@torch.no_grad()
def copied(w: Tensor) -> None:
    w.copy_(F.normalize(w, dim=1))


@torch.no_grad()
def by_out(w: Tensor) -> None:
    torch.mul(w, 0.5, out=w)


@torch.no_grad()
def in_a_list(w: Tensor) -> None:
    torch._foreach_mul_([w], 0.5)


@torch.no_grad()
def to_local(w: Tensor) -> None:
    local(w).mul_(0.5)


def data_written(w: Tensor) -> None:
    w.data.div_(2)


def data_set(w: Tensor) -> None:
    w.data = F.normalize(w.data, dim=1)


@torch.no_grad()
def row(w: Tensor) -> None:
    w[0].mul_(0.5)


@torch.no_grad()
def set_item(w: Tensor) -> None:
    w[1:, 2] = 0.25


@torch.no_grad()
def view(w: Tensor) -> None:
    w.view(-1)[3:7].clamp_(-0.1, 0.1)


def data_of_a_row(w: Tensor) -> None:
    w.data[0].mul_(0.5)


def recorded(w: Tensor) -> None:
    w.mul_(0.5)


def recorded_row(w: Tensor) -> None:
    w[0].mul_(0.5)


def looked_up(w: Tensor) -> None:
    """Writes as a library does: see `Block`, whose tokens are looked up with a `max_norm`."""


WRITES: dict[str, tuple[str, Callable[[Tensor], None], bool]] = {
    # What is written, how, and whether behind the use.
    "`w.copy_(normalize(w))`": ("whole", copied, False),
    "`torch.mul(w, 0.5, out=w)`": ("whole", by_out, False),
    "`torch._foreach_mul_([w], 0.5)`": ("whole", in_a_list, False),
    "`w.to_local().mul_(0.5)`": ("whole", to_local, False),
    "`w.data.div_(2)`": ("whole", data_written, False),
    "`w.data = normalize(w.data)`": ("whole", data_set, False),
    "`w[0].mul_(0.5)`": ("part", row, False),
    "`w[1:, 2] = 0.25`": ("part", set_item, False),
    "`w.view(-1)[3:7].clamp_(-0.1, 0.1)`": ("part", view, False),
    "`w.data[0].mul_(0.5)`": ("part", data_of_a_row, False),
    "`nn.Embedding(max_norm=0.5)`": ("part", looked_up, False),
    "use, then `w.copy_(normalize(w))`": ("whole", copied, True),
    "use, then `w[0].mul_(0.5)`": ("part", row, True),
    "use, then `w.data.div_(2)`": ("whole", data_written, True),
    "use, then `w.data = normalize(w.data)`": ("whole", data_set, True),
    "`w.mul_(0.5)`, recorded": ("whole", recorded, False),
    "`w[0].mul_(0.5)`, recorded": ("part", recorded_row, False),
}
WAYS = ("eager", "recomputed", "staged", "static")
LEVELS = (0, 1, 2, 3)


class Block(nn.Module):
    """A layer that writes to its weight, and is computed again in backward or not."""

    def __init__(self, name: str, again: bool) -> None:
        super().__init__()
        self.linear, self.again = nn.Linear(4, 4), again
        self.table = nn.Embedding(5, 4, max_norm=0.5) if "Embedding" in name else None
        _, self.write, self.late = WRITES[name]

    def hidden(self, x: Tensor, tokens: Tensor) -> Tensor:
        if not self.late:
            self.write(self.linear.weight)
        h = torch.tanh(self.linear(x))
        if self.late:
            self.write(self.linear.weight)
        return h if self.table is None else h + self.table(tokens)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        if self.again:
            return x + checkpoint(self.hidden, x, tokens, use_reentrant=False)
        return x + self.hidden(x, tokens)


class Writing(nn.Module):
    """Two such layers, and a head that writes as well, in the rest of the model."""

    def __init__(self, name: str, again: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(name, again) for _ in range(2))
        self.head = nn.Linear(4, 3, bias=False)
        _, self.write, self.late = WRITES[name]

    def forward(self, x: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, tokens)
        if not self.late:
            self.write(self.head.weight)
        return F.cross_entropy(self.head(x), targets)


def make(name: str, way: str) -> Writing:
    torch.manual_seed(0)
    return Writing(name, way == "recomputed")


def batch(step: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 4, generator=generator)
    return (
        x,
        torch.randint(5, (ROWS,), generator=generator),
        torch.randint(3, (ROWS,), generator=generator),
    )


def train(model: nn.Module, way: str, plain: bool, steps: int = 3) -> Tensor:
    """Losses of some steps, and all parameters at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        if way == "staged" and not plain:
            losses.append(forward_backward(model, *batch(step)))
        else:
            parts = 2 if way == "staged" else 1
            pieces = list(zip(*(one.chunk(parts) for one in batch(step)), strict=True))
            total = torch.zeros(())
            for piece in pieces:
                loss = model(*piece) / parts
                loss.backward()
                total += loss.detach() if plain else loss.detach().full_tensor()
            losses.append(total)
        optimizer.step()
    values = [p.detach() for p in model.parameters()]
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in values]
    return torch.cat([torch.stack(losses).view(-1), *(one.reshape(-1) for one in whole)])


def parallelized(name: str, way: str, zero: int, **words: Any) -> Any:
    sizes = {"dp": 2}
    if way == "staged":
        sizes = {"pp": 2, "dp": 2}
        words |= {"pipeline": Pipeline(stages="blocks.*"), "microbatches": 2}
    axes = ("pp", "dp")
    plan = Plan(batch="dp:0", axes=axes, zero=zero, **words)
    mesh = make_mesh(device_type="cpu", **sizes)
    return parallelize(make(name, way), mesh, plan, static=way == "static")


def _tried(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        return error


def cell(name: str, way: str, zero: int) -> str:
    """What becomes of a write: right, refused, or lost; and where torch refuses it, by whom."""
    expected = _tried(lambda: train(make(name, way), way, plain=True))

    def on_a_rank(rank: int, world_size: int) -> Any:
        return _tried(lambda: train(parallelized(name, way, zero), way, plain=False))

    results = simulate(4 if way == "staged" else 2).run(on_a_rank)
    raised = [isinstance(one, Exception) for one in results]
    if any(raised):
        named = all(type(one).__name__ != "DeadlockError" for one in results)
        word = "refused" if all(raised) and named else "HANGS"
        return "as torch" if isinstance(expected, Exception) and word == "refused" else word
    if isinstance(expected, Exception):
        return "ACCEPTED"
    close = [torch.allclose(one, expected, rtol=1e-5, atol=1e-6) for one in results]
    return "right" if all(close) else "LOST"


def cells(name: str, way: str) -> str:
    """The cells of all levels, as the page has them."""
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        found = [cell(name, way, zero) for zero in LEVELS]
    if len(set(found)) == 1:
        return found[0]
    groups: dict[str, list[str]] = {}
    for zero, word in zip(LEVELS, found, strict=True):
        groups.setdefault(word, []).append(str(zero))
    return "; ".join(f"{word} ({', '.join(levels)})" for word, levels in groups.items())


def page() -> str:
    lines = [f"| write | of | {' | '.join(WAYS)} |", f"|{'---|' * (2 + len(WAYS))}"]
    for name, (what, *_) in WRITES.items():
        lines.append(f"| {name} | {what} | {' | '.join(cells(name, way) for way in WAYS)} |")
        print(lines[-1], file=sys.stderr)  # it takes minutes
    # What stands around the table on the page stays there.
    head, _, rest = FILE.read_text().partition("\n|")
    return head + "\n" + "\n".join(lines) + rest[rest.rindex("|\n") + 1 :]


if __name__ == "__main__":
    torch.set_num_threads(1)
    text = page()
    wrong = [word for word in ("LOST", "HANGS", "ACCEPTED") if word in text]
    (sys.stdout if wrong else FILE.open("w")).write(text)
    if wrong:
        sys.exit(f"wrong: {wrong}")
