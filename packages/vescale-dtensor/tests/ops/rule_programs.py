"""Random programs over the whole table of cases, the same for one device and a mesh.

A program is a line of steps over a pool of tensors. A step takes a case of the rules' own table,
feeds it from the pool (whatever is drawn is brought to the shape and kind that the case wants) and
puts what comes out back; or it writes into a view of a tensor of the pool, changes a layout, starts
a new tensor by a factory, or reads a value into Python. Results are rounded to multiples of 1/64,
so that ops that jump see the same numbers on both sides, and gradients are kept small by hooks.
"""

from __future__ import annotations

import logging
import random
import warnings
from math import prod
from typing import NamedTuple

import torch
from rule_cases import CASES
from rule_fuzz import T, agree, full, phase, placements_for, values, words_of
from vescale_comm.testing import device_mesh
from vescale_dtensor import DTensor, UnsupportedError, gradient_total
from vescale_dtensor.rules._check_layouts import spread
from vescale_dtensor.rules._check_trial import flat

GRID = 64
LARGEST = 4.0
SHAPES = ((6, 5), (5, 4), (4,), (), (1,), (0, 3), (7, 1, 2), (2, 3, 4), (1, 1), (3,))
# Cases that say what torch refuses, or whose result is no number of this program's.
NAMES = sorted(name for name, op in CASES.items() if not (op.refuses or op.data))


class Step(NamedTuple):
    """What to do, with which shares of chance."""

    kind: str
    name: str
    picks: tuple[float, ...]
    seed: int


def program(seed, length):
    """The steps of a program."""
    chosen = random.Random(seed)
    kinds = ["case"] * 14 + ["view", "write", "relay", "make", "read", "again"]
    return [
        Step(
            chosen.choice(kinds),
            chosen.choice(NAMES),
            tuple(chosen.random() for _ in range(6)),
            chosen.randrange(2**31),
        )
        for _ in range(length)
    ]


def picked(pool, share):
    """Late tensors are read more often than early ones."""
    return pool[min(len(pool) - 1, int(share**0.5 * len(pool)))]


def fed(x, operand, share):
    """A tensor of the pool, in the shape and kind that an operand of a case has."""
    count = prod(operand.shape)
    line = x.reshape(-1)
    if count and not x.numel():
        line = x.new_ones(1)
    if line.shape[0] < count:
        line = torch.cat([line] * -(-count // max(1, line.shape[0])))
    shaped = (line[:count] if share < 0.5 else line.narrow(0, 0, count)).reshape(operand.shape)
    if operand.kind == "b":
        return shaped > 0
    if operand.kind == "i":
        span = operand.high - operand.low
        return (shaped.detach().abs() * GRID).long() % max(1, span) + operand.low
    if operand.kind == "p":
        return shaped.abs() + 0.25
    return shaped * 1


def tamed(x):
    """A result as a member of the pool: a number of moderate size, on the grid."""
    if not x.dtype.is_floating_point:
        x = x.abs() if x.is_complex() else x.double()
    # Terms of a sum may overflow where the sum does not, or cancel to what is no number.
    x = torch.nan_to_num(x.double(), 0.0, 0.0, 0.0).clamp(-LARGEST, LARGEST)
    result = x + (torch.round(x * GRID) / GRID - x).detach()
    if result.requires_grad:
        result.register_hook(lambda g: torch.nan_to_num(g, 0.0, 0.0, 0.0).clamp(-8, 8))
    return result


VIEWS = (
    lambda x: x[:],
    lambda x: x.reshape(-1)[: max(1, x.numel() // 2)],
    lambda x: x.transpose(0, -1) if x.ndim else x.view(1),
    lambda x: x.flatten(),
    lambda x: x.unsqueeze(0),
    lambda x: x[0] if x.ndim and x.shape[0] else x,
    lambda x: x.narrow(-1, 0, x.shape[-1] // 2) if x.ndim else x,
    lambda x: x.expand(2, *x.shape),
    lambda x: x.chunk(2, -1)[0] if x.ndim else x,
    lambda x: x.unfold(0, 2, 2) if x.ndim and x.shape[0] > 1 else x,
    lambda x: x.diagonal() if x.ndim > 1 else x,
    lambda x: x.squeeze(),
)
WRITES = (
    lambda x: x.mul_(0.5),
    lambda x: x.add_(0.25),
    lambda x: x.zero_(),
    lambda x: x.clamp_(-1, 1),
    lambda x: x.copy_(torch.ones(x.shape, dtype=x.dtype)),
    lambda x: x.neg_(),
)
FACTORIES = (
    torch.zeros_like,
    torch.rand_like,
    lambda x: torch.full_like(x, 0.5),
    lambda x: x.new_ones(3, 2),
    lambda x: torch.arange(max(1, x.numel())).double() / GRID,
    lambda x: torch.eye(4, dtype=torch.float64),
    lambda x: torch.randn_like(x).clamp(-2, 2),
)
READS = (
    lambda x: x * (1.0 + bool((x.sum() > 0).item())),
    lambda x: x + float(x.numel() and x.max()),
    lambda x: x * len(x.tolist() if x.ndim else [0]),
    lambda x: x + (1 if x.ndim and x.shape[0] == 5 else 2),
)


def run_step(step, pool, relay):
    """Add what a step makes to the pool; what it must not do, it leaves undone."""
    first, second, third, *_ = step.picks
    if step.kind == "case":
        op = CASES[step.name]
        shares = zip(step.picks, step.picks[3:], op.operands, strict=False)
        operands = [fed(picked(pool, share), operand, other) for share, other, operand in shares]
        pool += [tamed(r) for r in flat(op.call(*operands)) if isinstance(r, torch.Tensor)][:2]
        return
    x = picked(pool, first)
    if step.kind == "view":
        pool.append(tamed(VIEWS[int(second * len(VIEWS))](x)))
    elif step.kind == "write":
        target = x * 1
        seen = VIEWS[int(second * len(VIEWS))](target)
        WRITES[int(third * len(WRITES))](seen)
        pool += [tamed(target), tamed(seen)]
    elif step.kind == "relay":
        pool.append(relay(x, step.seed))
    elif step.kind == "make":
        made = FACTORIES[int(second * len(FACTORIES))](x.detach())
        pool.append(tamed(made))
    elif step.kind == "read":
        pool.append(tamed(READS[int(second * len(READS))](x)))
    elif step.kind == "again":
        pool.append(tamed(x + picked(pool, second).sum() / 8))


def relayer(mesh):
    def relay(x, seed):
        if not isinstance(x, DTensor):
            return x
        operand = T(tuple(x.shape), partial=False)
        wanted = placements_for(operand, tuple(mesh.shape), random.Random(seed))
        return x.redistribute(mesh, wanted)

    return relay


def beginning(mesh, seed):
    """The pool to begin with, of one device and of the mesh; its last tensors are leaves."""
    chosen, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dense, ours, leaves = [], [], []
    for shape in chosen.sample(SHAPES, 5):
        operand = T(shape)
        x = values(operand, generator) / 2
        leaf = x.clone().requires_grad_()
        if chosen.random() < 0.2:
            mine = x.clone().requires_grad_()  # plain tensors are mixed in
        else:
            placements = placements_for(operand, tuple(mesh.shape), chosen)
            placements = [type(p)("sum") if p.is_partial("avg") else p for p in placements]
            mine = spread(x, mesh, placements, generator).requires_grad_()
        leaves.append((leaf, mine))
        dense.append(leaf)
        ours.append(mine)
    return dense, ours, leaves


def compared(mesh, seed, length):
    """Nothing, or how a program differs from one device."""
    dense, ours, leaves = beginning(mesh, seed)
    relay = relayer(mesh)
    for place, step in enumerate(program(seed, length)):
        before, mine_before = len(dense), len(ours)
        torch.manual_seed(step.seed)
        _, refused = phase(lambda: run_step(step, dense, lambda x, _: x))  # noqa: B023
        state = torch.get_rng_state()
        torch.manual_seed(step.seed)
        _, problem = phase(lambda: run_step(step, ours, relay))  # noqa: B023
        if agree(refused is not None or problem is not None):
            if agree(refused is None and not isinstance(problem, UnsupportedError)):
                words = "another rank raised" if problem is None else words_of(problem)
                return f"step {place} {step.kind} {step.name}: {words}"
            del dense[before:], ours[mine_before:]
            continue
        if agree(not torch.equal(state, torch.get_rng_state())):
            return f"step {place} {step.kind} {step.name}: the generator is elsewhere"
    _, problem = phase(lambda: _check(dense, ours, leaves))
    if agree(problem):
        return words_of(problem) if problem else "another rank went wrong"
    return ""


def _check(dense, ours, leaves):
    assert len(dense) == len(ours)
    total = sum((x * ((i % 5) + 1)).sum() for i, x in enumerate(dense))
    mine = sum((x * ((i % 5) + 1)).sum() for i, x in enumerate(ours))
    for place, (got, wanted) in enumerate(zip(ours, dense, strict=True)):
        words = f"tensor {place} of the pool"
        same(full(got), wanted.detach(), words)
    _, refused = phase(total.backward)
    _, problem = phase(mine.backward)
    # Some ops have no derivative, and torch's lists get lost where only some of them want one.
    assert problem is None or refused is not None, f"only here: {problem!r}"
    if refused is not None:
        return
    for leaf, own in leaves:
        found = gradient_total(own) if isinstance(own, DTensor) else own.grad
        if found is None or leaf.grad is None:
            rest = leaf.grad if found is None else full(found)
            assert rest is None or not rest.any(), "only one side has a gradient"
            continue
        same(full(found), leaf.grad, "a gradient")


def same(found, wanted, what):
    torch.testing.assert_close(
        found, wanted, rtol=1e-7, atol=1e-7, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def run_programs(rank, world_size, sizes, seeds, length):
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            mesh = device_mesh(sizes)
            return [(seed, compared(mesh, seed, length)) for seed in seeds]
    finally:
        logging.disable(logging.NOTSET)
