"""Runs one op on DTensors of random layouts and on one device, and says where they differ.

A trial is determined by the name of its case and a seed: `vary` draws layouts, the kind of every
operand and the values, the same on every rank. So any report can be run again by itself.
"""

from __future__ import annotations

import random
import traceback
import warnings
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import torch
from vescale_comm.testing import device_mesh
from vescale_dtensor import (
    DTensor,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    UnsupportedError,
    gradient_total,
)
from vescale_dtensor.rules._check_layouts import GRID, spread
from vescale_dtensor.rules._check_trial import compare_metadata, flat


@dataclass(frozen=True)
class T:
    """A tensor operand: `kind` is f(loat), i(nteger below `high`), b(ool) or p(ositive float)."""

    shape: tuple[int, ...]
    kind: str = "f"
    high: int = 5
    grad: bool = True
    low: int = 0
    partial: bool = True


@dataclass(frozen=True)
class Op:
    """A case: what to call, on which operands, and how exact it is.

    The rounding of another order of sums is admitted where it is not `exact`. With `refuses` a
    documented refusal is as good as an answer. Without `flags`, whether a result wants gradients is
    not compared: torch's lists want them all, if one does.
    """

    call: object
    operands: tuple[T, ...]
    exact: bool = False
    refuses: bool = False
    strides: bool = True
    ordered: bool = True
    data: bool = False
    flags: bool = True


@dataclass
class Trial:
    """What one trial found: nothing, or words; and whether both sides raised."""

    name: str
    seed: int
    problem: str = ""
    raised: bool = False
    layouts: list[str] = field(default_factory=list)


def values(operand, generator):
    shape = operand.shape
    if operand.kind == "b":
        return torch.rand(shape, generator=generator) < 0.5
    if operand.kind == "i":
        return torch.randint(operand.low, operand.high, shape, generator=generator)
    low = 1 if operand.kind == "p" else -2 * GRID
    x = torch.randint(low, 2 * GRID + 1, shape, generator=generator).double() / GRID
    if operand.kind == "d":  # all different: no ties between extremes
        x = (torch.randperm(max(1, prod(shape)), generator=generator)[: prod(shape)]).double()
        x = (x.reshape(shape) - prod(shape) // 2) / GRID
    return x


def placements_for(operand, sizes, chosen):
    """One random placement per mesh axis that the operand can have."""
    result = []
    for count in sizes:
        options = [Replicate()] + [Shard(d) for d in range(len(operand.shape))] * 2
        if operand.kind != "b" and operand.partial:
            options.append(Partial())
            if operand.kind != "i":
                options += [Partial("avg")] if chosen.random() < 0.2 else []
        if operand.shape and chosen.random() < 0.15:
            dim = chosen.randrange(len(operand.shape))
            units = ragged_units(operand.shape[dim], count, chosen)
            if units and not any(p.is_sharded(dim) for p in result):
                options = [RaggedShard((dim,), units)]
        pick = chosen.choice(options)
        if pick.is_sharded() and any(
            isinstance(p, RaggedShard) and p.dim == pick.dim for p in result
        ):
            pick = Replicate()
        result.append(pick)
    return result


def ragged_units(extent, count, chosen):
    if extent == 0:
        return None
    marks = sorted(chosen.randint(0, extent) for _ in range(count - 1))
    edges = [0, *marks, extent]
    return [b - a for a, b in pairwise(edges)]


class Vary:
    """Draws everything that a trial varies."""

    def __init__(self, mesh, seed):
        self.mesh = mesh
        self.chosen = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def operands(self, op):
        """Dense operands, their DTensors, the leaves of both, and a description."""
        dense, ours, leaves, words = [], [], [], []
        first_plain = False
        for index, operand in enumerate(op.operands):
            x = values(operand, self.generator)
            if op.ordered and x.ndim > 1 and self.chosen.random() < 0.2:
                dims = list(range(x.ndim))
                self.chosen.shuffle(dims)
                back = sorted(range(x.ndim), key=dims.__getitem__)
                x = x.permute(dims).contiguous().permute(back)
            wants = operand.grad and x.dtype.is_floating_point and self.chosen.random() < 0.8
            plain = self.chosen.random() < 0.12 and index != len(op.operands) - 1
            if index == 1 and not first_plain:
                plain = self.chosen.random() < 0.12
            first_plain = first_plain or plain
            leaf = x.clone().requires_grad_(wants)
            kind = self.chosen.choice(("leaf", "mul", "redistributed"))
            if plain:
                mine = x.clone().requires_grad_(wants)
                used, words_here = mine, "plain"
            else:
                placements = self._placements(operand)
                mine, used, words_here = self._wrapped(x, placements, wants, kind)
            dense.append(leaf if kind == "leaf" or plain or not wants else leaf * 1)
            ours.append(used)
            leaves.append((leaf, mine) if wants else None)
            words.append(f"{words_here} {tuple(x.shape)} {'grad' if wants else ''}")
        return dense, ours, leaves, words

    def _placements(self, operand):
        return placements_for(operand, tuple(self.mesh.shape), self.chosen)

    def _wrapped(self, x, placements, wants, kind):
        mine = spread(x, self.mesh, placements, self.generator).requires_grad_(wants)
        if not wants or kind == "leaf":
            return mine, mine, f"leaf {placements}"
        if kind == "mul":
            return mine, mine * 1, f"mul {placements}"
        other = [
            Shard(self.chosen.randrange(x.ndim))
            if x.ndim and self.chosen.random() < 0.5
            else Replicate()
            for _ in placements
        ]
        return mine, (mine * 1).redistribute(self.mesh, other), f"{placements} -> {other}"


def full(x):
    return x.full_tensor().detach() if isinstance(x, DTensor) else x.detach()


# What the order of sums may change, in numbers of about one; where it was summed in halves, the
# terms are as large as the largest result.
BOUNDS = {torch.float64: 1e-9, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def bound_of(tensors):
    """The coarsest bound of some tensors."""
    return max((BOUNDS.get(x.dtype, 1e-5) for x in tensors if x.is_floating_point()), default=0.0)


def same(found, wanted, loose, bound=0.0):
    if loose and wanted.is_floating_point() and found.shape == wanted.shape:
        # A partial sum over zero: its terms are infinities, which do not add up to one.
        finite = wanted.isfinite()
        assert not found[~finite].isfinite().any(), f"{found} is not {wanted}"
        found, wanted = found[finite], wanted[finite]
    bound = max(bound, BOUNDS.get(found.dtype, 1e-5))
    size = float(wanted.abs().max()) if bound > 1e-5 and wanted.numel() else 1.0
    tolerance = {"rtol": bound, "atol": bound * max(1.0, size)} if loose else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found, wanted, equal_nan=True, **tolerance)


def agree(problem):
    """Whether any rank has a problem: then all stop here, so that none waits for another."""
    bad = torch.tensor([bool(problem)], dtype=torch.int32)
    torch.distributed.all_reduce(bad)
    return int(bad) > 0


def phase(work):
    """The result of a piece of work that all ranks do, or the exception."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def words_of(error):
    frames = (
        [] if isinstance(error, AssertionError) else traceback.format_tb(error.__traceback__)[-2:]
    )
    return f"{type(error).__name__}: {error}\n{''.join(frames)}"


def trial(name, op, mesh, seed):
    """Run one case once; every difference ends in `problem`."""
    found = Trial(name, seed)
    vary = Vary(mesh, zlib.crc32(f"{name} {seed}".encode()))
    dense, ours, leaves, found.layouts = vary.operands(op)
    if not any(isinstance(o, DTensor) for o in ours):
        return found
    torch.manual_seed(seed)
    wanted, failure = phase(lambda: op.call(*dense))
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    got, error = phase(lambda: op.call(*ours))
    moved = not torch.equal(state, torch.get_rng_state())
    if agree(failure is not None or error is not None):
        found.raised = failure is not None
        found.problem = judged(op, failure, error)
        if op.data and failure is not None:
            # Only the ranks that hold the offending values can see them.
            found.problem = ""
        return found
    # What needs no other rank follows at once on the communication before it: all agree once.
    steps = [
        lambda: compare(op, dense, ours, wanted, got, moved),
        lambda: all_same(fulls(flat(got)), flat(wanted), not op.exact),
        lambda: all_same(fulls(ours), dense, not op.exact),
        lambda: backward(wanted, got, vary.generator),
        lambda: same_gradients(gradients(leaves), leaves, bound_of(tensors(wanted))),
    ]
    for step in steps:
        _, problem = phase(step)
        if agree(problem):
            found.problem = words_of(problem) if problem else "another rank went wrong"
            return found
    return found


def judged(op, failure, error):
    if failure is None:
        if error is None:
            return "another rank raised"
        return "" if op.refuses and isinstance(error, UnsupportedError) else words_of(error)
    return "" if error is not None else f"did not raise; one device: {words_of(failure)[:300]}"


def compare(op, dense, ours, wanted, got, moved):
    """What can be said without communication."""
    assert not moved, "the generator is elsewhere"
    results, mine = flat(wanted), flat(got)
    assert len(results) == len(mine), f"{len(mine)} results, not {len(results)}"
    for one, other in zip(results, mine, strict=True):
        if not isinstance(one, torch.Tensor):
            assert type(one) is type(other), f"{other!r} is not {one!r}"
            near = not op.exact and isinstance(one, float) and abs(one - other) < 1e-9
            assert near or one == other or one != one, f"{other!r} is not {one!r}"
            continue
        if not isinstance(other, DTensor) and not all(isinstance(o, DTensor) for o in ours):
            continue  # nothing but plain tensors went into it
        metadata(op, one, other)
        held = [i for i, d in enumerate(dense) if d is one]
        if held and isinstance(ours[held[0]], DTensor):
            assert other is ours[held[0]], "another object than the operand came back"


def metadata(op, one, other):
    compare_metadata("result", other, one, strides=op.strides)
    if op.flags:
        assert other.requires_grad == one.requires_grad, f"requires_grad {other.requires_grad}"


def fulls(tensors):
    return [full(x) if isinstance(x, torch.Tensor) else x for x in tensors]


def all_same(found, wanted, loose):
    for mine, one in zip(found, wanted, strict=True):
        if isinstance(one, torch.Tensor):
            same(mine, one.detach(), loose)


def backward(wanted, got, generator):
    roots = [
        (one, other)
        for one, other in zip(flat(wanted), flat(got), strict=True)
        if isinstance(one, torch.Tensor) and one.requires_grad and other.requires_grad
    ]
    starts = [
        torch.randint(-4, 5, one.shape, generator=generator).to(one.dtype) for one, _ in roots
    ]
    # A Python function may return the same tensor twice.
    if roots:
        try:
            torch.autograd.backward([one for one, _ in roots], starts)
        except RuntimeError:
            return  # no derivative on one device
        torch.autograd.backward([other for _, other in roots], starts)


def gradients(leaves):
    found = []
    for pair in leaves:
        if pair is None:
            found.append(None)
            continue
        mine = pair[1]
        grad = gradient_total(mine) if isinstance(mine, DTensor) else mine.grad
        found.append(None if grad is None else full(grad))
    return found


def tensors(result):
    return [item for item in flat(result) if isinstance(item, torch.Tensor)]


def same_gradients(found, leaves, bound):
    for index, (grad, pair) in enumerate(zip(found, leaves, strict=True)):
        if pair is None:
            continue
        wanted = pair[0].grad
        if wanted is None or grad is None:
            # Zeros and nothing differ only in what one device skips.
            missing = wanted if wanted is not None else grad
            assert missing is None or not missing.any(), f"gradient {index}: {grad}, {wanted}"
            continue
        try:
            same(grad, wanted, True, bound)
        except AssertionError as problem:
            raise AssertionError(f"gradient {index}: {problem}") from None


def run_trials(rank, world_size, sizes, table, jobs):
    """Run (name, seed) jobs; what went wrong, as data."""
    import importlib

    cases = importlib.import_module(table).CASES
    mesh = device_mesh(sizes)
    results = []
    for name, seed in jobs:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            # Torch warns once a process, or of what a whole tensor has and a piece has not.
            found = trial(name, cases[name], mesh, seed)
        results.append((name, seed, found.problem, found.raised, found.layouts))
    return results


def problems(by_rank):
    """One line per trial that went wrong on any rank, or not alike on all."""
    lines = []
    for rows in zip(*by_rank, strict=True):
        bad = [f"rank {rank}: {row[2]}" for rank, row in enumerate(rows) if row[2]]
        if bad:
            name, seed, *_, layouts = rows[0]
            told = [words for words in bad if "another rank" not in words] or bad
            lines.append(f"{name} seed={seed} {layouts}\n  ({len(bad)} ranks) {told[0]}")
    return lines
