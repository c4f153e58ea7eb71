"""A graph cut into regions for a compiler, and which regions of ranks belong together.

Ranks agree on the order in which collectives start, and on nothing between two of them: where a
gradient is masked or a bias is added by one rank only, their operators differ, and so may the
waits between them. So a region is known by how many collectives have started before it, and by
its place among the regions there, where ranks have as many of them in between the same nodes. Where
they have not, all regions between two collectives belong together.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module

from vescale_parallel._graph.collectives import is_wait, schema_name
from vescale_parallel._graph.numbers import takers_of_numbers
from vescale_parallel._memory.graph_copy import copied_module

FEW: Final = "few operations"
_REGION: Final = "|"


@dataclass(frozen=True)
class RegionGraph:
    """A graph as calls of modules: regions of operators, and runs of what stays between them.

    Attributes:
        module: it; called as the given one.
        regions: its modules of operators by their name, in the order in which they are called.
        starts: what is sent, in order, as text that is the same on all ranks.
        between: for each number of collectives that have started: what stays there, and where
            regions are, as text.
    """

    module: fx.GraphModule
    regions: Mapping[str, fx.GraphModule]
    starts: tuple[str, ...]
    between: tuple[str, ...]


def cut_regions(graph: fx.GraphModule) -> RegionGraph:
    """Cut a graph at what is no operator of torch; the graph stays as it is."""
    copy, _ = copied_module(graph)
    takers = takers_of_numbers(copy.graph)
    _put_next_to_makers(copy.graph)
    parts: dict[fx.Node, str] = {}
    starts: list[str] = []
    between: list[list[str]] = [[]]
    # Numbered by their first use: names of process groups are each process's own.
    groups: dict[str, int] = {}
    now = ""
    for node in copy.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node not in takers and not _stays(node):
            # Names say where a region lies: ranks tell each other by them what they could not
            # compile.
            if not now.startswith("region"):
                now = f"region_{len(starts)}_{between[-1].count(_REGION)}"
                between[-1].append(_REGION)
        else:
            if not now.startswith("kept"):
                now = f"kept_{len(starts)}_{len(between[-1])}"
            if _starts(node):
                starts.append(_sent(node, groups))
                between.append([])
            else:
                between[-1].append(schema_name(node) or str(node.target))
        parts[node] = now
    # In the order of the graph: split_module sorts its parts by what they need otherwise, and
    # collectives would change places.
    made = split_module(copy, copy, parts.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
    called = [str(node.target) for node in made.graph.nodes if node.op == "call_module"]
    regions: dict[str, Any] = {
        name: made.get_submodule(name) for name in called if name.startswith("submod_region_")
    }
    return RegionGraph(made, regions, tuple(starts), tuple(map(" ".join, between)))


def _put_next_to_makers(graph: fx.Graph) -> None:
    """Take results of an operator with several where they are made: no region hands on a tuple."""
    for node in list(graph.nodes):
        maker = node.args[0] if node.target is operator.getitem else None
        if isinstance(maker, fx.Node) and maker.op == "call_function":
            maker.append(node)


def _stays(node: fx.Node) -> bool:
    """Whether a node is no operator of torch: a collective, a draw, or a Python function."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _stays(node.args[0])
    # A compiler would draw other numbers.
    draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return draws or not schema_name(node).startswith(("aten::", "prims::"))


def _starts(node: fx.Node) -> bool:
    return "c10d" in schema_name(node) and not is_wait(node)


def _sent(node: fx.Node, groups: dict[str, int]) -> str:
    """A collective as text: no names of groups and no sizes, which differ over ranks."""
    *given, group = node.args
    number = groups.setdefault(str(group), len(groups))
    how = [one for one in given if isinstance(one, str)]
    value = given[0].meta.get("val") if given and isinstance(given[0], fx.Node) else None
    dtype = [str(value.dtype)] if isinstance(value, Tensor) else []
    return " ".join([schema_name(node), *how, *dtype, f"group {number}"])


def operators(module: fx.GraphModule) -> list[fx.Node]:
    """What a region computes."""
    return [node for node in module.graph.nodes if node.op == "call_function"]


def content(module: fx.GraphModule) -> str:
    """A digest of a region's operators, of the values that go in, and of which come out.

    Compilers make the same code of regions that have the same.
    """
    # By number: names of nodes tell how often a rank has used an operator before.
    number = {node: f"%{at}" for at, node in enumerate(module.graph.nodes)}
    rows = [
        [node.op, str(node.target) if node.op == "call_function" else "", _laid(node)]
        + [repr(fx.node.map_arg(each, lambda one: _Name(number[one]))) for each in _given(node)]
        for node in module.graph.nodes
    ]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


class _Name(str):
    """Prints as it is."""

    def __repr__(self) -> str:
        return str(self)


def _given(node: fx.Node) -> tuple[Any, dict[str, Any]]:
    # A device has the number of its rank.
    kept = {key: one for key, one in node.kwargs.items() if key != "device"}
    return node.args, kept


def _laid(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return ""
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}"


def matching_gaps(between: Sequence[Sequence[str]]) -> frozenset[int]:
    """The gaps between collectives whose regions belong together one by one on all ranks.

    Args:
        between: of each rank, what stays in each gap, and where regions are.
    """
    return frozenset(at for at, each in enumerate(zip(*between, strict=True)) if len({*each}) == 1)


def of_all_ranks(
    mine: Mapping[str, str], whys: Sequence[Mapping[str, str]], lined_up: frozenset[int]
) -> dict[str, str]:
    """Why some rank does not compile each region of this one; empty if all do.

    Args:
        mine: for each region of this rank, why it does not.
        whys: the same of each rank.
        lined_up: what `matching_gaps` gave.
    """
    found: dict[str, str] = {}
    for rank, told in enumerate(whys):
        for name, why in told.items():
            # How many operators a region has is no fault of those beside it.
            if why and not (why.endswith(FEW) and gap_of(name) not in lined_up):
                # What was agreed on before has its rank already.
                tells = len(whys) > 1 and not why.startswith("rank ")
                key = _key(name, lined_up)
                found.setdefault(key, f"rank {rank}: {why}" if tells else why)
    return {name: found.get(_key(name, lined_up), why) for name, why in mine.items()}


def alike(
    mine: Sequence[str], contents: Sequence[Mapping[str, str]], lined_up: frozenset[int]
) -> dict[str, bool]:
    """Whether each region of this rank has the same content on all ranks."""
    return {
        name: gap_of(name) in lined_up and len({one[name] for one in contents}) == 1
        for name in mine
    }


def gap_of(name: str) -> int:
    """How many collectives have started before a region."""
    return int(name.split("_")[2])


def _key(name: str, lined_up: frozenset[int]) -> str:
    return name if gap_of(name) in lined_up else f"gap {gap_of(name)}"
