"""Makes a program that fails smaller, as long as it fails in the same way, and prints it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from beside import judge
from random_programs import LEVELS, used, values_of

TRIES = 300


def shrunk(program, failure):
    """The smallest program found that fails as this one, and its failure."""
    left = TRIES
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            left -= 1
            if left < 0:
                return program, failure
            found, _ = judge(candidate)
            if found is not None and found.kind == failure.kind:
                program, failure, smaller = candidate, found, True
                break
    return program, failure


def _smaller(program) -> Iterator:
    """Programs with less in them, those with the least first."""
    for place in reversed(range(len(program.lines))):
        yield replace(program, lines=program.lines[:place] + program.lines[place + 1 :])
    names = set().union(*map(used, program.lines))
    # Values are drawn by place: the last one can go.
    if len(program.inputs) > 1 and program.inputs[-1].name not in names:
        yield replace(program, inputs=program.inputs[:-1])
    for level in LEVELS[: LEVELS.index(program.level)]:
        yield replace(program, level=level)
    if program.sizes == (2, 2):
        for axis in (0, 1):
            yield _changed(program, lambda p, axis=axis: [p[axis]], sizes=(2,))
    for place, each in enumerate(program.inputs):
        if each.wants:
            yield _with_input(program, place, wants=False)
        cuts = _split(each.placements)
        for axis, cut in enumerate(cuts):
            simple = ["Replicate()"]
            if not cut.startswith(("Shard", "Replicate", "Partial")):
                simple += [f"Shard({dim})" for dim in range(len(each.shape))]
            for other in simple if cut != "Replicate()" else ():
                text = f"[{', '.join([*cuts[:axis], other, *cuts[axis + 1 :]])}]"
                yield _with_input(program, place, placements=text)


def _with_input(program, place, **changes):
    inputs = list(program.inputs)
    inputs[place] = replace(inputs[place], **changes)
    return replace(program, inputs=tuple(inputs))


def _changed(program, cut, *, sizes):
    """On another mesh; `to(...)` of lines takes the placements that are left, too."""
    inputs = tuple(
        replace(each, placements=f"[{', '.join(cut(_split(each.placements)))}]")
        for each in program.inputs
    )
    lines = []
    for line in program.lines:
        head, found, rest = line.partition(" = to(")
        if found:
            name, _, placements = rest.partition(", ")
            line = f"{head}{found}{name}, [{', '.join(cut(_split(placements[:-1])))}])"
        lines.append(line)
    return replace(program, inputs=inputs, lines=tuple(lines), sizes=sizes)


def _split(placements):
    """The placements in `[Shard(0), RaggedShard((0, 1), (1, 2))]`, as texts."""
    found, depth = [""], 0
    for letter in placements[1:-1]:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            found.append("")
        elif letter != " " or depth:
            found[-1] += letter
    return found


def pasted(program, failure):
    """A program as Python that prints the results of one device and of a rank, where pasted."""
    values = values_of(program)
    names = [each.name for each in program.inputs]
    body = "\n".join(f"    {line}" for line in program.lines)
    made = "\n".join(
        f"    {each.name} = put(torch.tensor({values[each.name].tolist()}, dtype=torch."
        f"{each.dtype}).reshape({each.shape}), {each.placements}){_WANTS * each.wants}"
        for each in program.inputs
    )
    derived = "list" if program.level == LEVELS[0] else "derived"
    ours = ["from random_programs import case"] if "case(" in body else []
    return "\n".join([
        f'"""{program.grammar}:{program.seed}, {failure.kind}: {failure.words[:300]}"""',
        _HEAD, *ours, "", "def program(put, to):", made, body,
        f"    return {', '.join(dict.fromkeys([*names, *_assigned(program)]))}", "",
        *([_DERIVED] if derived == "derived" else []),
        _TAIL.format(sizes=program.sizes, ranks=prod(program.sizes), derived=derived),
    ])  # fmt: skip


def _assigned(program):
    return [line.split(" = ")[0] for line in program.lines if line.startswith("x") and " = " in line
            and line.split(" = ")[0].isidentifier()]  # fmt: skip


_WANTS = ".requires_grad_()"
_HEAD = """import torch
import torch.nn.functional as F
from vescale_comm import simulate
from vescale_dtensor import *
"""
_DERIVED = """def derived(made):
    total = sum((x.double() ** 2).sum() * 0.25 * (i % 4) + x.double().sum() * (i % 3 + 1)
        for i, x in enumerate(made) if isinstance(x, torch.Tensor) and x.requires_grad)
    leaves = [x for x in made if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf]
    first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    parts = [(g.detach() + g * g).sum() / 16 for g in first if g is not None and g.requires_grad]
    second = torch.autograd.grad(sum(parts), leaves, allow_unused=True) if parts else ()
    return [*made, *first, *second]
"""
_TAIL = """def on_a_rank(rank, size):
    mesh = init_device_mesh("cpu", {sizes})
    put = lambda x, p: distribute_tensor(x, mesh, [Replicate() for _ in p], src_data_rank=None
        ).redistribute(mesh, p)
    return [x.full_tensor() if isinstance(x, DTensor) else x
        for x in {derived}(program(put, lambda x, p: x.redistribute(mesh, p).clone()))]

print(*{derived}(program(lambda x, p: x, lambda x, p: x.clone())), sep="\\n")
print(*simulate({ranks}).run(on_a_rank)[0], sep="\\n")"""
