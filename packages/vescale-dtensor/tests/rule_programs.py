"""Random programs: lines of ops over a pool of tensors, the same for one device and a mesh."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from rule_fuzz import T, Vary, agree, full, lay, phase, placements_for, values, words_of
from vescale_comm.testing import device_mesh
from vescale_dtensor import DTensor, gradient_total

ROWS, COLUMNS = 6, 5

# Each takes tensors of shape [ROWS, COLUMNS] and gives one of that shape, of moderate size.
STEPS = {
    "tanh": lambda x, y: x.tanh(),
    "scale": lambda x, y: 0.5 * x + 1,
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - 0.5 * y,
    "multiply": lambda x, y: torch.tanh(x * y),
    "divide": lambda x, y: x / (2 + y.square()),
    "row": lambda x, y: x - y[0],
    "column": lambda x, y: x + y[:, 1:2],
    "softmax_rows": lambda x, y: x.softmax(0),
    "softmax_columns": lambda x, y: F.log_softmax(x, -1).tanh(),
    "normalise": lambda x, y: F.layer_norm(x, (COLUMNS,)),
    "rms": lambda x, y: F.rms_norm(x, (COLUMNS,), y[1]),
    "mean": lambda x, y: x - x.mean(0, keepdim=True) + y.mean(),
    "sum": lambda x, y: x + y.sum(1, keepdim=True).tanh(),
    "maximum": lambda x, y: x - x.amax(1, keepdim=True) * 0.1,
    "matmul": lambda x, y: torch.tanh(x @ y.t() @ x),
    "gram": lambda x, y: torch.tanh(x @ (x.t() @ y)),
    "linear": lambda x, y: torch.tanh(F.linear(x, y[:COLUMNS], y[0])),
    "transpose": lambda x, y: x.t().contiguous().t() + y,
    "reshape": lambda x, y: x.reshape(-1).view(ROWS, COLUMNS) + y,
    "reshape_odd": lambda x, y: (x.reshape(3, 2, COLUMNS) * 0.5).flatten(0, 1),
    "unsqueeze": lambda x, y: (x.unsqueeze(1) + y.unsqueeze(1)).squeeze(1),
    "cat": lambda x, y: torch.cat([x, y], 0)[1 : ROWS + 1],
    "stack": lambda x, y: torch.stack([x, y]).mean(0),
    "split": lambda x, y: torch.cat([part * 0.5 for part in x.split(2)], 0),
    "chunk": lambda x, y: torch.cat(list(reversed(x.chunk(2, 1))), 1),
    "cumsum": lambda x, y: x.cumsum(0) * 0.2,
    "where": lambda x, y: torch.where(x > y, x, y * 0.5),
    "fill": lambda x, y: x.masked_fill(y > 0.5, 0.25),
    "in_place": lambda x, y: (x * 1).add_(y),
    "relu": lambda x, y: F.relu(x * 1, inplace=True) + y,
    "detach": lambda x, y: x + y.detach(),
    "dropout": lambda x, y: F.dropout(x, 0.3) + y,
    "noise": lambda x, y: x + 0.1 * torch.rand_like(y),
    "gather": lambda x, y: x[torch.arange(ROWS - 1, -1, -1)],
    "flip": lambda x, y: x.flip(0) + y,
    "expand": lambda x, y: x + y[:1].expand(ROWS, COLUMNS),
    "tril": lambda x, y: x.tril() + y.triu(),
    "attention": lambda x, y: F.scaled_dot_product_attention(
        *[t.reshape(1, 1, ROWS, COLUMNS) for t in (x, y, x)], is_causal=True
    )[0, 0],
    "loss": lambda x, y: x + F.cross_entropy(y, torch.tensor([0, 1, 2, 3, 4, -100])),
    "embed": lambda x, y: F.embedding(torch.tensor([0, 5, 2, 2, 1, 3]), x) + y,
    "setitem": lambda x, y: _set(x * 1, y),
    "foreach": lambda x, y: torch._foreach_mul([x, y], [y, x])[1].tanh(),
}


def _set(x, y):
    x[1:3] = y[0]
    return x


def program(seed, length):
    """Steps by name, with the places in the pool that they read, and where layouts change."""
    chosen = random.Random(seed)
    names = sorted(STEPS)
    return [
        (chosen.choice(names), chosen.random(), chosen.random(), chosen.random())
        for _ in range(length)
    ]


def at(pool, share):
    """Late tensors are read more often than early ones."""
    return pool[int(share**0.5 * len(pool))]


def execute(steps, pool, relay):
    for name, first, second, change in steps:
        x = STEPS[name](at(pool, first), at(pool, second))
        pool.append(relay(x) if change < 0.25 else x)
    return sum(x.sum() * 0.1 for x in pool[3:])


def relayer(mesh, seed):
    chosen = random.Random(seed)

    def relay(x):
        if not isinstance(x, DTensor):
            return x

        wanted = placements_for(T(tuple(x.shape), partial=False), tuple(mesh.shape), chosen)
        return x.redistribute(mesh, wanted)

    return relay


def compared(mesh, seed, length):
    """Nothing, or how a program differs from one device."""
    vary = Vary(mesh, seed)
    steps = program(seed, length)
    dense, ours = [], []

    for _ in range(3):
        x = values(T((ROWS, COLUMNS)), vary.generator) / 2
        placements = placements_for(T((ROWS, COLUMNS)), tuple(mesh.shape), vary.chosen)
        if any(p.is_partial("avg") for p in placements):
            placements = [p if not p.is_partial("avg") else type(p)("sum") for p in placements]
        dense.append(x.clone().requires_grad_())
        ours.append(lay(x, mesh, placements, vary.generator, False).requires_grad_())
    torch.manual_seed(seed)
    wanted = execute(steps, list(dense), lambda x: x)
    wanted.backward()
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    _, problem = phase(lambda: _check(steps, ours, dense, mesh, seed, wanted, state))
    if agree(problem):
        return words_of(problem) if problem else "another rank went wrong"
    return ""


def _check(steps, ours, dense, mesh, seed, wanted, state):
    got = execute(steps, list(ours), relayer(mesh, seed))
    got.backward()
    assert torch.equal(torch.get_rng_state(), state), "the generator is elsewhere"
    found = [full(got), *[full(gradient_total(x)) if x.grad is not None else None for x in ours]]
    for mine, one in zip(found, [wanted, *[x.grad for x in dense]], strict=True):
        if mine is None or one is None:
            assert mine is one, "only one side has a gradient"
            continue
        torch.testing.assert_close(mine, one.detach(), rtol=1e-8, atol=1e-8)


def run_programs(rank, world_size, sizes, seeds, length):
    mesh = device_mesh(sizes)
    return [(seed, compared(mesh, seed, length)) for seed in seeds]
