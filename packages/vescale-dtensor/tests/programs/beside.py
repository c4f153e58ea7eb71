"""Runs a program on simulated ranks and on one device, and says where they differ."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from math import prod

import torch
import vescale_dtensor as vd
from random_programs import (
    LEVELS,
    assigned,
    derivatives,
    leaves_of,
    run_line,
    space,
    tensors_of,
    used,
    values_of,
)
from vescale_comm import DeadlockError, SimulationError, simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import DTensor, Replicate, UnsupportedError, gradient_total, placement_types
from vescale_dtensor.rules._check_trial import compare_metadata

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PLACEMENTS = {name: getattr(placement_types, name) for name in (
    "Shard", "Replicate", "Partial", "RaggedShard", "InterleavedShard", "StridedShard"
)}  # fmt: skip


class Differs(Exception):
    """A program is not as on one device: in what, and how."""

    def __init__(self, kind, words):
        super().__init__(words)
        self.kind = kind


@dataclass(frozen=True)
class Failure:
    """What went wrong: `kind` is the same for one fault in programs of other sizes."""

    kind: str
    words: str


def judge(program):
    """How a program differs from one device, and the lines that are refused; (None, lines)."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            by_rank = simulate(prod(program.sizes)).run(_on_a_rank, program)
    except SimulationError as error:
        return _failure(error.errors), ()
    finally:
        logging.disable(logging.NOTSET)
    if any(each != by_rank[0] for each in by_rank):
        return Failure("refused on some ranks", str(by_rank)), ()
    return None, by_rank[0]


def _failure(errors):
    # What one rank alone raises leaves the others waiting: the cause is the one that did not wait.
    ranks = sorted(errors, key=lambda rank: (isinstance(errors[rank], DeadlockError), rank))
    first = errors[ranks[0]]
    kind = first.kind if isinstance(first, Differs) else type(first).__name__
    waits = [rank for rank in ranks if isinstance(errors[rank], DeadlockError)]
    alone = f", ranks {waits} wait" if waits and len(waits) < len(ranks) else ""
    return Failure(kind, f"rank {ranks[0]}: {type(first).__name__}: {str(first)[:1500]}{alone}")


def _on_a_rank(rank, world_size, program):
    mesh = device_mesh(program.sizes)
    plain_leaves, leaves = leaves_of(program), spread_inputs(program, mesh)
    plain = space(lambda x, _: x.clone(), plain_leaves)
    ours = space(lambda x, placements: _relaid(x, mesh, placements), leaves) | PLACEMENTS
    plain |= PLACEMENTS
    refused = []
    for line in program.lines:
        there = tensors_of(plain)
        if used(line) <= there.keys() and not any(_is_stale(there[name]) for name in used(line)):
            refused += _one_line(line, plain, ours)
    for name, x in tensors_of(plain).items():
        _same("values", name, ours[name], x)
    wanted = [each.name for each in program.inputs if each.wants]
    if program.level != LEVELS[0] and wanted:
        one = [plain_leaves[name] for name in wanted]
        other = [leaves[name] for name in wanted]
        expected = derivatives(plain, one, program.level, _gradient)
        found = derivatives(ours, other, program.level, _gradient)
        for place, (mine, it) in enumerate(zip(found, expected, strict=True)):
            order = LEVELS[1 + place // len(wanted)]
            _same(order, f"by {wanted[place % len(wanted)]}", mine, it)
    return refused


# Writes that torch lets pass, some with a warning, and that limits.md says are refused.
REFUSED_HERE = {
    "has expanded dims": ("tril_", "triu_", "index_fill_", "index_put_"),
    "a view of a leaf": ("logical_",),
}


def _is_refused_here(line, problem):
    said = [names for words, names in REFUSED_HERE.items() if words in str(problem)]
    return any(name in line for names in said for name in names)


def _one_line(line, plain, ours):
    """Run a line on both sides; what was refused with words is done on neither."""
    problem = run_line(line, ours)
    state = torch.get_rng_state()
    if isinstance(problem, UnsupportedError) or _is_refused_here(line, problem):
        return [f"{line}: {str(problem)[:200]}"]
    if isinstance(problem, DeadlockError):
        raise problem
    expected = run_line(line, plain)
    if (problem is None) != (expected is None):
        if problem is None:
            told = f"{type(expected).__name__}: {expected}"
            raise Differs("accepted", f"{line} is accepted; one device: {told[:300]}")
        raise Differs(f"raised {type(problem).__name__}", f"{line}: {problem}") from problem
    if problem is None and not torch.equal(state, torch.get_rng_state()):
        raise Differs("generator", f"{line} leaves the generator elsewhere")
    made = assigned(line)
    if problem is None and made:
        _metadata(line, ours[made], plain[made])
    return []


def _metadata(line, mine, one):
    if isinstance(mine, DTensor) and isinstance(one, torch.Tensor):
        try:
            compare_metadata("result", mine, one)
        except Exception as error:
            raise Differs("metadata", f"{line}: {error}") from None
        if mine.requires_grad != one.requires_grad:
            raise Differs("requires_grad", f"{line}: {mine.requires_grad}")
    elif type(one) is not type(mine):
        raise Differs("type", f"{line}: {type(mine)} for {type(one)}")


def _is_stale(one):
    """Whether it is an output of `split` whose base was written to; see docs/limits.md."""
    if not isinstance(one, torch.Tensor) or not one._is_view():
        return False
    return run_line("x.clone()", {"x": one}) is not None


def _same(what, name, mine, one):
    if not isinstance(one, torch.Tensor) and one is not None:
        if mine != one:
            raise Differs(what, f"{name}: {mine} for {one}")
        return
    if one is None or mine is None:
        rest = one if mine is None else mine
        rest = rest.full_tensor() if isinstance(rest, DTensor) else rest
        if rest is None or (isinstance(rest, torch.Tensor) and not rest.any()):
            return  # zeros and nothing differ only in what one device skips
        raise Differs(what, f"{name}: {mine} for {one}")
    if _is_stale(one):
        return
    found = mine.detach()
    found = found.full_tensor() if isinstance(found, DTensor) else found
    bound = BOUNDS.get(one.dtype, 1e-7)
    try:
        torch.testing.assert_close(found, one.detach(), rtol=bound, atol=bound, equal_nan=True)
    except AssertionError as error:
        words = f"{name}: {found.tolist()} for {one.tolist()}" if one.numel() < 40 else str(error)
        raise Differs(what, words) from None


def _gradient(leaf):
    return gradient_total(leaf) if isinstance(leaf, DTensor) else leaf.grad


def _relaid(x, mesh, placements):
    return x.redistribute(mesh, placements).clone() if isinstance(x, DTensor) else x.clone()


def spread_inputs(program, mesh):
    found = {}
    for place, (each, x) in enumerate(
        zip(program.inputs, values_of(program).values(), strict=True)
    ):
        if not each.plain:
            x = spread(x, mesh, eval(each.placements, PLACEMENTS), place)
        found[each.name] = x.requires_grad_(each.wants)
    return found


def spread(x, mesh, placements, seed):
    """A DTensor of a value; the terms of partial sums are drawn alike on every rank."""
    cut, order, shape = list(placements), x.stride(), tuple(x.shape)
    generator = torch.Generator().manual_seed(seed)
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            count, at = mesh.size(axis), mesh.get_local_rank(axis)
            # Times any number, such terms add up to zero exactly: functions have kinks there.
            noise = [torch.randint(-1, 2, x.shape, generator=generator).to(x.dtype) * 2
                     for _ in range(min(count - 1, 2))]  # fmt: skip
            while len(noise) < count - 1:
                noise.append(-noise[-2])
            whole = x * count if placement.reduce_op == "avg" else x
            x = noise[at - 1] if at else whole - sum(noise)
            cut[axis] = Replicate()
    found = vd.distribute_tensor(x, mesh, cut, src_data_rank=None)
    if cut == list(placements):
        return found
    return DTensor.from_local(found.to_local(), mesh, placements, shape=shape, stride=order)
