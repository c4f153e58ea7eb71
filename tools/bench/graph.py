"""Memory of training steps as graphs: planned order and layout, against program order.

Forward, loss, backward and Adam (in place) of small models on one CPU device. All sizes are of what
a step makes; parameters, moments and the batch are not counted. `measured` lines are of the
allocator: they are planned / counted, and 1 is right. `plan seconds` are of this machine.

With `--zoo`, nine models of ROAM's evaluation (arXiv 2310.19295) at their real sizes, on paper:
what the planned order takes with its arena, against torch's caching allocator (simulated) in
program order, list scheduling, and the bound below which no order is.

With `--ilp SECONDS`, each model is planned a second time by one integer program over the whole
graph (MODeL's form, HiGHS), which is given so much time: the order's seconds and peak against it.

With `--hidden`, whole training steps with ZeRO-3 on four gloo ranks: ours as a graph, as traced,
with its communication scheduled, that with the regions between it compiled (Inductor: minutes at
first), in a planned order, and with a part of it computed twice so that less is kept; against ours
in eager mode, torch's FSDP2, and the form of SimpleFSDP (a parametrization, compiled as well). Same
model, batches and optimizer, checked against one device, as in the benchmark `train`.

With `--ranks`, steps of a data-parallel model over gloo as well: the joint graph of a step, as it
is traced and with its communication scheduled, against eager mode and torch's DDP, in one run.

    nox -s bench -- graph
    nox -s bench -- graph --models --ranks 1 --hidden 64 512
    nox -s bench -- graph --models --hidden --ranks 2
    nox -s bench -- graph --models MLP convnet --seconds 5 --solver search
    nox -s bench -- graph --models --hidden --ranks 1 --zoo AlexNet ViT-B --batches 1 32
    nox -s bench -- graph --models MLP --hidden --ranks 1 --ilp 3600
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map
from vescale_comm.testing import run
from vescale_parallel import memory

from tools.bench import Ratio
from tools.bench._graph import overlap
from tools.bench._graph.models import MODELS, train_step
from tools.bench._graph.zoo import ZOO, traced_step
from tools.bench._train.cases import FITTED, GRAPHS, SCHEDULED
from tools.bench._train.model import Sizes
from tools.bench._train.ranks import Job, compare, mesh_size

_TABLE: list[dict[str, Any]] = []
_LAYOUT = "dp4.zero3.graph"


def parser() -> argparse.ArgumentParser:
    """The options of this benchmark."""
    made = argparse.ArgumentParser(
        prog="nox -s bench -- graph",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    made.add_argument("--seconds", type=float, default=20, help="to plan in (default: 20)")
    made.add_argument("--solver", choices=memory.SOLVERS, default="auto", help="default: auto")
    made.add_argument("--ranks", type=int, default=2, help="for overlap; 1: none (default: 2)")
    made.add_argument("--rounds", type=int, default=20, help="of overlap (default: 20)")
    made.add_argument("--hidden", nargs="*", type=int, default=[64], help="sharded (default: 64)")
    made.add_argument("--turns", type=int, default=9, help="of each sharded step (default: 9)")
    made.add_argument("--ilp", type=float, default=0, help="seconds for it (default: none)")
    made.add_argument("--zoo", nargs="*", choices=ZOO, default=[], help="on paper (default: none)")
    made.add_argument("--batches", nargs="+", type=int, default=[1, 32], help="of the zoo")
    made.add_argument("--only", nargs="+", default=[], help="these sharded steps beside torch's")
    return made


def measure(
    models: Sequence[str] = tuple(MODELS),
    seconds: float = 20,
    solver: Any = "auto",
    ranks: int = 2,
    rounds: int = 20,
    hidden: Sequence[int] = (64,),
    turns: int = 9,
    only: Sequence[str] = (),
    zoo: Sequence[str] = (),
    batches: Sequence[int] = (1, 32),
    ilp: float = 0,
) -> Iterator[Ratio]:
    """For each model: peaks of orders, the arena, what allocators count, and seconds."""
    for width in hidden:
        yield from _sharded(width, turns, only)
    if ranks > 1:
        yield from _overlapped(ranks, rounds)
    for name, batch in product(zoo, batches):
        yield from _on_paper(f"{name}, batch {batch}", traced_step(name, batch), seconds, solver)
    for name in models:
        graph, inputs = train_step(name)
        workspaces = memory.workspaces(graph, *_copies(inputs))
        plan = memory.plan(graph, seconds=seconds, solver=solver, workspaces=workspaces)
        kept = {key: getattr(plan, key) for key in _KEPT}
        _TABLE.append({"model": name, "operations": len(plan.order), **kept})
        yield from _planned(name, plan)
        yield from _counted(name, plan, graph, inputs)
        if ilp:
            yield from _beside_ilp(name, plan, graph, ilp, workspaces)


def _beside_ilp(
    name: str, plan: memory.MemoryPlan, graph: fx.GraphModule, seconds: float, workspaces: Any
) -> Iterator[Ratio]:
    """Seconds and peak of a plan against those of one integer program over all operations."""
    # A plan keeps a third of its time for the layout, which is the same here.
    other = memory.plan(graph, solver="ilp", seconds=seconds * 3 / 2, workspaces=workspaces)
    _TABLE.append({"model": name, "ilp": {key: getattr(other, key) for key in _KEPT}})
    against = "integer program" if other.complete else "integer program, cut short"
    yield Ratio(f"{name}, plan seconds", plan.seconds, other.seconds, "s", against, goal=1 / 50)
    peaks = plan.peak / 2**20, other.peak / 2**20
    yield Ratio(f"{name}, planned order", *peaks, "MiB", against, goal=1)


def _on_paper(name: str, graph: fx.GraphModule, seconds: float, solver: Any) -> Iterator[Ratio]:
    """Bytes of a plan that nobody executes, against torch's allocator, a heuristic, the bound."""
    plan = memory.plan(graph, seconds=seconds, solver=solver)
    kept = {key: getattr(plan, key) for key in _KEPT}
    _TABLE.append({"model": name, "operations": len(plan.order), **kept})
    # What either needs of a device: an arena with what lies outside, or segments of an allocator.
    ours = plan.executed_peak / 2**20
    torchs = plan.reserved["program order"] / 2**20
    yield Ratio(f"{name}, planned", ours, torchs, "MiB", "torch's allocator", goal=0.65)
    if "list scheduling" in plan.peaks:  # it gives up when time is over
        listed = plan.peaks["list scheduling"] / 2**20
        yield Ratio(f"{name}, planned", ours, listed, "MiB", "list scheduling", goal=0.87)
    bound = plan.lower_bound / 2**20
    yield Ratio(f"{name}, planned", ours, bound, "MiB", "lower bound", goal=1.03)
    yield Ratio(f"{name}, plan seconds", plan.seconds, 1, "s", "a second")


def _sharded(hidden: int, turns: int, only: Sequence[str]) -> Iterator[Ratio]:
    """Tokens per second, bytes at the peak of a step, and collectives, against FSDP2."""
    first, *others = GRAPHS[_LAYOUT][1]
    kept = (first, *only) if only else ()
    job = Job(layout=_LAYOUT, sizes=Sizes(hidden=hidden), rounds=turns, only=kept)
    found = run(compare, mesh_size(_LAYOUT), job, timeout=1800)
    case = f"{_LAYOUT} {hidden}"
    ranks = [{name: asdict(one) for name, one in each.items()} for each in found]
    _TABLE.append({"case": case, "ranks": ranks})
    mine, tokens = found[0], job.sizes.tokens
    for name in (one for one in others if one in mine):
        what, goals = (
            f"{case} {name}",
            (1.68, 0.71) if name in (SCHEDULED, FITTED) else (None, None),
        )
        speed, torchs = tokens / mine[name].median, tokens / mine[first].median
        yield Ratio(what, speed, torchs, "tok/s", first, goals[0], more_is_better=True)
        taken, torchs = (max(r[one].taken for r in found) / 1e6 for one in (name, first))
        yield Ratio(what, taken, torchs, "MB taken", first)
        if not mine[name].collectives:  # compiled: no meter of operators sees it
            continue
        peak, torchs = (max(r[one].peak.total for r in found) / 1e6 for one in (name, first))
        yield Ratio(what, peak, torchs, "MB", first, goals[1])
        sent, torchs = (sum(mine[one].collectives.values()) for one in (name, first))
        yield Ratio(what, sent, torchs, "coll.", first)


def _overlapped(ranks: int, rounds: int) -> Iterator[Ratio]:
    told = run(overlap.trained, ranks, rounds, timeout=600)
    # A step takes as long as its slowest rank.
    found = {name: max(one[name] for one in told) for name in told[0]}
    peaks = {name: found.pop(name) / 2**20 for name in ("peak", "scheduled peak", "planned peak")}
    _TABLE.append({"overlap": found, "peaks": peaks, "ranks": ranks})
    for name, took in found.items():
        yield Ratio(f"dp={ranks}, {name}", took * 1e3, found["eager"] * 1e3, "ms", "eager")
    for name in ("scheduled peak", "planned peak"):
        yield Ratio(f"dp={ranks}, joint, {name}", peaks[name], peaks["peak"], "MiB", "as traced")


_KEPT = (
    *("program_peak", "peak", "lower_bound", "peaks", "arena", "outside", "executed_peak"),
    *("reserved", "seconds", "complete"),
)


def details() -> tuple[str, Any]:
    """All that was planned, in bytes."""
    return "", _TABLE


def _copies(values: Any) -> Any:
    return tree_map(lambda one: one.clone(), values)


def _planned(name: str, plan: memory.MemoryPlan) -> Iterator[Ratio]:
    whole = plan.program_peak / 2**20
    against = "program order"
    listed = plan.peaks["list scheduling"] / 2**20
    yield Ratio(f"{name}, list scheduling", listed, whole, "MiB", against)
    yield Ratio(f"{name}, planned order", plan.peak / 2**20, whole, "MiB", against, goal=1)
    bound = plan.lower_bound / 2**20
    yield Ratio(f"{name}, above the bound", plan.peak / 2**20, bound, "MiB", "lower bound")
    yield Ratio(
        f"{name}, executed, arena {plan.arena / 2**20:.1f}",
        plan.executed_peak / 2**20,
        whole,
        "MiB",
        against,
    )
    before, after = (plan.reserved[f"{one} order"] / 2**20 for one in ("program", "planned"))
    yield Ratio(f"{name}, caching allocator", after, before, "MiB", "the same, program order")
    yield Ratio(f"{name}, plan seconds", plan.seconds, 1, "s", "a second")


def _counted(name: str, plan: memory.MemoryPlan, graph: Any, inputs: Any) -> Iterator[Ratio]:
    moved = plan.apply()
    expected = _copies(inputs)
    loss = graph(*expected)
    for what, call, planned in (
        ("program order", graph, plan.program_peak),
        ("planned order", moved, plan.peak),
        ("executed", plan.run, plan.executed_peak),
    ):
        given = _copies(inputs)
        found = memory.measured(functools.partial(call, *given))
        pairs = zip(tree_leaves((loss, expected)), tree_leaves((found.result, given)), strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            raise RuntimeError(f"{name}, {what}: not the bits of the given graph")
        yield Ratio(
            f"{name}, {what} measured", planned / 2**20, found.peak / 2**20, "MiB", "counted"
        )
