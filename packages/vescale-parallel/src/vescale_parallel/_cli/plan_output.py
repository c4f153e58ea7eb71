"""The answer of `plan`: tables for people, JSON for programs."""

import json
from collections.abc import Mapping
from typing import Any

from vescale_parallel._cli.step_costs import PlanCost
from vescale_parallel._common.messages import count, human_bytes, listed, table
from vescale_parallel._cost import Cost
from vescale_parallel._plan.fields import as_zero


def as_text(one: PlanCost) -> str:
    """Return the rules, what they place, what a rank holds and sends, and whether it fits."""
    sizes = ", ".join(f"{axis}={size}" for axis, size in one.report.mesh)
    elements = sum(_elements(row.global_shape) for row in one.report.parameters)
    head = f"{elements:,} parameters on mesh({sizes}), {count(one.cost.ranks, 'rank')}"
    parts = [head, one.plan.to_toml().strip(), _rules(one), _memory(one), _wire(one.cost)]
    return "\n\n".join([*parts, "\n".join([*_notes(one), _verdict(one)])])


def _rules(one: PlanCost) -> str:
    """Return a line for each rule: 126 layers have a thousand parameters and five rules."""
    found: dict[str, list[Any]] = {}
    for row in one.report.parameters:
        found.setdefault(row.rule, []).append(row)
    rows = [
        (
            rule,
            members[0].layout,
            len(members),
            human_bytes(sum(_whole_bytes(row) for row in members)),
            human_bytes(sum(row.local_bytes for row in members)),
        )
        for rule, members in found.items()
    ]
    header = ["rule", "layout", "parameters", "on one device", "largest shards"]
    return table(header, rows, right=header[2:])


def _whole_bytes(row: Any) -> int:
    # By way of the bytes of an element, which a row does not tell.
    local = _elements(row.local_shape)
    return int(row.local_bytes // local * _elements(row.global_shape)) if local else 0


def _elements(shape: tuple[int, ...]) -> int:
    found = 1
    for extent in shape:
        found *= extent
    return found


def _memory(one: PlanCost) -> str:
    shown = {"all kept": one.costs[False], "blocks recomputed": one.costs[True]}
    if one.report.regions:
        shown["as the plan says"] = one.costs[None]
    names = [*vars(one.cost.memory), "total"]
    rows = [
        (name, *(human_bytes(round(getattr(cost.memory, name))) for cost in shown.values()))
        for name in names
    ]
    header = ["memory of a rank", *shown]
    return table(header, rows, right=header[1:])


def _wire(cost: Cost) -> str:
    rows = [
        (axis, kind, number, human_bytes(round(sent)), f"{1e3 * seconds:.3g}")
        for (axis, kind), (number, sent, seconds) in _by_kind(cost).items()
    ]
    header = ["axis", "collective", "a step", "sent by a rank", "ms"]
    return table(header, rows, right=header[2:])


def _by_kind(cost: Cost) -> dict[tuple[str, str], tuple[int, float, float]]:
    found: dict[tuple[str, str], tuple[int, float, float]] = {}
    for one, sent, seconds in cost.transfers:
        number, other, earlier = found.get((one.axis, one.kind), (0, 0.0, 0.0))
        found[one.axis, one.kind] = number + one.count, other + sent, earlier + seconds
    return found


def _notes(one: PlanCost) -> list[str]:
    left_out = [f"not counted: {text}" for text in one.report.unpriced]
    return [f"note: {text}" for text in (*one.report.notes, *left_out)]


def _verdict(one: PlanCost) -> str:
    cost = one.cost
    said = "as the plan says" if one.report.regions else "all activations kept"
    how = "blocks recomputed" if one.chosen else said
    fits = "fits in" if one.fits else "does NOT fit in"
    step = (
        f"{1e3 * cost.seconds:.4g} ms a step on {cost.cluster.name} ({1e3 * cost.exposed:.3g} of it"
        f" waiting), {cost.tokens_per_second:.4g} tokens/s a device, {cost.utilization:.1%} of peak"
    )
    memory = f"{human_bytes(round(cost.memory.total))} {fits} {human_bytes(round(one.memory))}"
    return f"{how}: {memory}; {step}{_advice(one)}"


def _advice(one: PlanCost) -> str:
    """Return what would be tried next, where it does not fit."""
    if one.fits:
        return ""
    tried = []
    # Where it helps: a model without repeated blocks has nothing to compute again.
    if not one.chosen and one.costs[True].memory.total < one.cost.memory.total:
        tried.append("--checkpoint full")
    level = as_zero(one.plan.zero).level
    if isinstance(level, int) and level < 3:
        tried.append("--zero 3")
    tried += ["more ranks of tp or dp", "fewer --sequences"]
    return f"\ntry {listed(tried)}"


def as_json(one: PlanCost) -> str:
    """Return the same for programs; bytes, seconds and counts as numbers."""
    content = {
        "mesh": dict(one.report.mesh),
        # As `to_json` has it, so that `Plan.from_json` reads this part of the answer.
        "plan": json.loads(one.plan.to_json()),
        "parameters": sum(_elements(row.global_shape) for row in one.report.parameters),
        "notes": list(one.report.notes),
        "not_counted": list(one.report.unpriced),
        "fits": one.fits,
        "memory_of_a_device": one.memory,
        "recompute": bool(one.chosen),
        "all_kept": _cost(one.costs[False]),
        "blocks_recomputed": _cost(one.costs[True]),
        "as_the_plan_says": _cost(one.costs[None]),
    }
    return json.dumps(content, indent=2)


def _cost(cost: Cost) -> Mapping[str, Any]:
    wire = [
        {"axis": axis, "collective": kind, "count": number, "bytes": sent, "seconds": seconds}
        for (axis, kind), (number, sent, seconds) in _by_kind(cost).items()
    ]
    return {
        "bytes": {**vars(cost.memory), "total": cost.memory.total},
        "collectives": wire,
        "flops": cost.flops,
        "seconds": cost.seconds,
        "tokens_per_second": cost.tokens_per_second,
        "utilization": cost.utilization,
    }
