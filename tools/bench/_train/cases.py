"""Lists the variants that run on each mesh: a further one is a line here."""

from __future__ import annotations

from functools import partial

from vescale_parallel import Plan

from tools.bench._graph.sharded import OnGraph
from tools.bench._graph.simple_fsdp import SimpleFSDP
from tools.bench._train.by_hand import ByHand
from tools.bench._train.by_hand_context import ByHandContext, Way
from tools.bench._train.by_hand_zero import ByHandZero3
from tools.bench._train.by_torch import ByTorch, ReplicatedByTorch
from tools.bench._train.ours import PLAN, PLAN_CONTEXT, PLAN_ZERO3, Ours
from tools.bench._train.stage_variants import StagedByTorch, StagedVariant
from tools.bench._train.training import Build, OneDevice

EAGER, STATIC, STEP = "ours, eager", "ours, static=True", "ours, captured step"
WHOLE_STEP = "ours, graph.train_step"
"""Static forms: forwards or units captured by themselves; the whole step, captured; and that as one
scheduled graph."""
TORCH, REPLICATED, HAND = "FSDP2 (+ TP) of torch", "DDP (+ TP) of torch", "by hand"
COMPILED_TORCH = "torch's, blocks compiled"
"""Of torch's kind of the layout: what captured forms, which remove Python and fuse nothing, face
besides."""

_OURS: dict[str, Build] = {
    EAGER: Ours,
    STATIC: partial(Ours, static=True),
    STEP: partial(Ours, captured=True),
}

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Build]]] = {
    "dp2.tp2": (
        {"dp": 2, "tp": 2},
        {
            REPLICATED: ReplicatedByTorch,
            **_OURS,
            WHOLE_STEP: partial(OnGraph, plan=PLAN, scheduled=True),
            HAND: ByHand,
            COMPILED_TORCH: partial(ReplicatedByTorch, compiled=True),
        },
    ),
    "dp4": ({"dp": 4}, {REPLICATED: ReplicatedByTorch, **_OURS, HAND: ByHand}),
    # torch's variant is FSDP2 alone here, and the one by hand shards as it does.
    "dp4.zero3": (
        {"dp": 4},
        {
            TORCH: ByTorch,
            EAGER: partial(Ours, plan=PLAN_ZERO3),
            STATIC: partial(Ours, plan=PLAN_ZERO3, static=True),
            WHOLE_STEP: partial(OnGraph, scheduled=True),
            HAND: ByHandZero3,
            COMPILED_TORCH: partial(ByTorch, compiled=True),
        },
    ),
    # Sharded over dp as torch's variant is; in a layout of its own, since steps of other variants
    # are captured, and a capture looks at the hooks of all optimizers of the process.
    "dp2.tp2.zero3": (
        {"dp": 2, "tp": 2},
        {
            TORCH: ByTorch,
            EAGER: partial(Ours, plan=PLAN.with_(zero=3)),
            STATIC: partial(Ours, plan=PLAN.with_(zero=3), static=True),
            WHOLE_STEP: partial(OnGraph, plan=PLAN.with_(zero=3), scheduled=True),
        },
    ),
}
"""Mesh axes and variants by the name of a layout; the first variant is what others are held to:
torch's of the same kind, which replicates over dp what ours does, or shards it."""

STAGED_OURS, STAGED_STATIC, STAGED_TORCH = "ours", "ours, static", "torch's pipelining"


def staged_layout(ranks: int, schedule: str) -> str:
    """The name of a layout of stages."""
    return f"pp{ranks}.{schedule}"


STAGED: dict[str, tuple[dict[str, int], dict[str, Build]]] = {
    staged_layout(ranks, schedule): (
        {"pp": ranks},
        {
            STAGED_TORCH: partial(StagedByTorch, schedule=schedule),
            STAGED_OURS: partial(StagedVariant, schedule=schedule),
            STAGED_STATIC: partial(StagedVariant, schedule=schedule, static=True),
        },
    )
    for ranks in (2, 4)
    for schedule in ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")
}
"""The same for stages; the benchmark `pipeline` measures them."""

WHOLE = "whole on each rank"

# A ring is held to keys gathered by hand: what it sends more, and keeps less.
_WAYS: dict[str, tuple[Way, Plan]] = {
    "exchange": ("exchange", PLAN_CONTEXT.with_(sequence="ulysses")),
    "gather": ("gather", PLAN_CONTEXT.with_(sequence="gather")),
    "ring": ("gather", PLAN_CONTEXT.with_(sequence="ring")),
}
CONTEXT: dict[str, tuple[dict[str, int], dict[str, Build]]] = {
    f"cp{ranks}.{way}": (
        {"cp": ranks},
        {
            HAND: partial(ByHandContext, way=hand),
            WHOLE: lambda sizes, mesh: OneDevice(sizes),
            EAGER: partial(Ours, plan=plan),
            STEP: partial(Ours, plan=plan, captured=True),
        },
    )
    for ranks in (2, 4)
    for way, (hand, plan) in _WAYS.items()
}
"""The same for sharded sequences; the benchmark `context` measures them."""

GRAPH, SCHEDULED, SIMPLE = "ours, graph", "ours, scheduled graph", "SimpleFSDP's form, compiled"
PLANNED = "ours, graph in a planned order"
COMPILED = "ours, scheduled graph, regions compiled"
FITTED = "ours, scheduled graph, part computed twice"
FITTED_COMPILED = f"{FITTED}, regions compiled"
SHARE = 0.667
"""Of what a graph makes, kept by those that compute the rest twice: 0.64 is the least there is."""

GRAPHS: dict[str, tuple[dict[str, int], dict[str, Build]]] = {
    "dp4.zero3.graph": (
        {"dp": 4},
        {
            TORCH: ByTorch,
            EAGER: partial(Ours, plan=PLAN_ZERO3),
            GRAPH: OnGraph,
            SCHEDULED: partial(OnGraph, scheduled=True),
            PLANNED: partial(OnGraph, planned=True),
            COMPILED: partial(OnGraph, scheduled=True, compiled=True),
            FITTED: partial(OnGraph, share=SHARE, scheduled=True),
            FITTED_COMPILED: partial(OnGraph, share=SHARE, scheduled=True, compiled=True),
            SIMPLE: SimpleFSDP,
        },
    ),
}
"""The same for steps as graphs; the benchmark `graph` measures them."""

STATIC_FORMS = (STATIC, STEP, WHOLE_STEP)

GOALS: dict[tuple[str, int, str], float] = {
    ("dp2.tp2", 64, EAGER): 1.8,
    ("dp2.tp2", 512, EAGER): 1.0,
    **dict.fromkeys([("dp2.tp2", 64, form) for form in STATIC_FORMS], 2.5),
    **dict.fromkeys([("dp2.tp2", 512, form) for form in STATIC_FORMS], 1.1),
    **dict.fromkeys([("dp4.zero3", 64, form) for form in STATIC_FORMS], 2.0),
    **dict.fromkeys([("dp4.zero3", 512, form) for form in STATIC_FORMS], 1.2),
}
"""Tokens per second that are aimed for, in those of the first variant: (layout, hidden, name)."""

MEMORY_GOAL = 0.9
"""Live bytes at the peak that are aimed for, in those of the first variant."""

SHARDED = frozenset({"dp4.zero3", "dp2.tp2.zero3"})
"""Layouts in which ours shards what the first variant shards, so that memory has that goal."""
