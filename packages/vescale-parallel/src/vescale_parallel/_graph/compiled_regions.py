"""Compiles regions between the collectives of a graph; the rest runs as it is.

Collectives, waits and random draws stay calls of the graph, in its order, so that what a schedule
has arranged stays arranged and streams of random numbers move as before. The runs of operators
between them are regions, each a graph of its own for `torch.compile`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from vescale_comm.agreement import gather_texts

from vescale_parallel._common.agreement import require_alike
from vescale_parallel._common.messages import listed, table
from vescale_parallel._errors import GraphError
from vescale_parallel._graph.agreement import ADVICE, HEAD
from vescale_parallel._graph.numbers import TakingNumbers, with_tensors
from vescale_parallel._graph.regions import (
    FEW,
    RegionGraph,
    alike,
    content,
    cut_regions,
    matching_gaps,
    of_all_ranks,
    operators,
)
from vescale_parallel._memory.graph_copy import copied_module


@dataclass(frozen=True)
class Region:
    """Operators between two nodes that stay.

    Attributes:
        name: of its module in the graph.
        operations: how many it has, on this rank.
        modules: of the model, that they are of, as far as that is known.
        why_not: why it runs as it is; empty if it is compiled.
        alike: whether all ranks compute the same there, with values that lie alike.
    """

    name: str
    operations: int
    modules: tuple[str, ...]
    why_not: str = ""
    alike: bool = True

    def __str__(self) -> str:
        others = "" if self.alike else "; ranks compute otherwise here"
        return (self.why_not or "compiled") + others


@dataclass(frozen=True)
class Compiled:
    """A graph whose regions are compiled: `graph_module` is called as the given one.

    Attributes:
        graph_module: it calls a module for each region.
        regions: in the order of the graph.
    """

    graph_module: fx.GraphModule
    regions: tuple[Region, ...]

    def __str__(self) -> str:
        rows = [
            [one.name, str(one.operations), ", ".join(one.modules), str(one)]
            for one in self.regions
        ]
        header = ["region", "operations", "modules", "how"]
        done = sum(not one.why_not for one in self.regions)
        return f"{table(header, rows, right=header[1:2])}\n\n{done} of {len(rows)} regions compiled"


def compile_regions(
    graph: fx.GraphModule,
    *,
    backend: str | Callable[..., Any] = "inductor",
    least_operations: int = 2,
) -> Compiled:
    """Compile what lies between the collectives of a graph. Collective: all ranks call it alike.

    Each region is compiled at once, for the shapes that its nodes have, by running it on zeros:
    the graph itself does not run, and nothing that it writes to is touched. Ranks tell each other
    what they could not compile, and that runs as it is on all of them. Compiled code adds and
    rounds in another order than the graph (which is what makes it fast), so results equal the
    graph's up to rounding.

    Ranks have to send the same, and may compute other things in between: with tensor parallelism
    one adds a bias, or masks a gradient, that others do not. A value that several ranks compute for
    themselves is the same on them as long as their regions are (`Region.alike`); elsewhere a
    compiler may round it otherwise on each.

    Args:
        graph: of `vescale_dtensor.joint`, `train_step(...).graph_module`, `schedule`, or of
            `make_fx` with functional collectives; nodes have fake tensors in `meta["val"]`. It
            stays as it is.
        backend: of `torch.compile`. Inductor needs a C++ compiler on CPUs.
        least_operations: regions with fewer, on any rank, are left as they are.

    Raises:
        DisagreementError: on every rank, if their collectives, or these arguments, differ.
        GraphError: on every rank, if one cannot take its graph apart, or has no such backend.
    """
    fault, parts = "", None
    regions: list[Region] = []
    try:
        _check_backend(backend)
        parts = cut_regions(graph)
        regions = [_region(*one, least_operations) for one in parts.regions.items()]
    except Exception as error:  # raised in `_compared`, on all ranks: the others are on their way
        fault = f"{type(error).__name__}: {error}"
    options = {"backend": _name_of(backend), "least_operations": str(least_operations)}
    # Before anything is compiled, which may take minutes.
    regions, lined_up = _compared(parts, regions, fault, options)
    assert parts is not None
    made = {}
    for at, one in enumerate(regions):
        if not one.why_not:
            made[one.name], why = _compiled(parts.regions[one.name], backend)
            regions[at] = replace(one, why_not=why)
    # On every rank, also where all of its regions compiled: a region that one rank runs as it is,
    # all do, or values that they compute for themselves would round apart.
    regions = _agreed(regions, _told(_whys(regions)), lined_up)
    for one in regions:
        if not one.why_not:
            # Only now: until ranks have agreed, all regions of the module are as they were.
            setattr(parts.module, one.name, made[one.name])
    parts.module.recompile()
    return Compiled(parts.module, tuple(regions))


def _region(name: str, module: fx.GraphModule, least_operations: int) -> Region:
    labels = (node.meta.get("label") for node in module.graph.nodes)
    modules = dict.fromkeys(str(getattr(label, "module", "")) for label in labels)
    count = len(operators(module))
    return Region(
        name, count, tuple(filter(None, modules)), FEW if count < least_operations else ""
    )


def _check_backend(backend: str | Callable[..., Any]) -> None:
    # Those for debugging, too, which torch leaves out if it is not told.
    known = torch.compiler.list_backends(exclude_tags=())
    if isinstance(backend, str) and backend not in known:
        raise GraphError(f"torch.compile has no backend {backend!r}, but {listed(known, 20)}")


def _name_of(backend: str | Callable[..., Any]) -> str:
    return backend if isinstance(backend, str) else getattr(backend, "__qualname__", "a callable")


def _compiled(module: fx.GraphModule, backend: Any) -> tuple[Any, str]:
    """The module compiled for its shapes, or as it is, and why it cannot be."""
    try:
        of, _ = copied_module(module)
        places = with_tensors(of)
        inputs = [_zeros(node) for node in of.graph.nodes if node.op == "placeholder"]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler, about code that is not the user's
            made: Any = torch.compile(of, backend=backend, fullgraph=True, dynamic=False)
            made(*inputs)
    except Exception as error:  # whatever a compiler raises: the region runs as it is
        said = " ".join(str(error).split("\n")[:2])  # the second line is of the backend's error
        return module, f"{type(error).__name__}: {said[:200]}"
    return (TakingNumbers(made, places) if places else made), ""


def _zeros(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        if value is None:
            raise GraphError(f"node '{node.name}' does not say what it is: it has no meta['val']")
        return value
    size = value.untyped_storage().nbytes() // max(1, value.itemsize)
    # As large as the storage, of which the value may be a view: a compiler looks at strides and
    # offsets.
    flat = torch.zeros(size, dtype=value.dtype, device=value.device)
    made = flat.as_strided(value.shape, value.stride(), value.storage_offset())
    # Compiled code is for inputs that ask for gradients, or for those that do not.
    return made.requires_grad_(value.requires_grad)


def _compared(
    parts: RegionGraph | None, regions: Sequence[Region], fault: str, options: Mapping[str, str]
) -> tuple[list[Region], frozenset[int]]:
    """The regions, agreed on, and the gaps in which those of ranks belong together. Collective.

    Raises:
        DisagreementError: collectives of ranks, or options, differ.
        GraphError: a rank has a fault.
    """
    starts = {} if parts is None else {f"number {n}": one for n, one in enumerate(parts.starts)}
    facts = {"option": options, "collective": starts}
    mine: dict[str, Any] = {"fault": fault, "facts": facts, "why": _whys(regions)}
    if parts is not None:
        mine["between"] = parts.between
        mine["contents"] = {name: content(one) for name, one in parts.regions.items()}
    told = _told(mine)
    # First faults of all ranks: who has one has told no collectives, which are compared below.
    for rank, one in enumerate(told):
        if one["fault"]:
            raise GraphError(f"compile_regions, rank {rank}: {one['fault']}")
    require_alike([one["facts"] for one in told], head=HEAD, advice=ADVICE)
    lined_up = matching_gaps([one["between"] for one in told])
    same = alike([one.name for one in regions], [one["contents"] for one in told], lined_up)
    regions = _agreed(regions, [one["why"] for one in told], lined_up)
    return [replace(one, alike=same[one.name]) for one in regions], lined_up


def _agreed(
    regions: Sequence[Region], whys: Sequence[Mapping[str, str]], lined_up: frozenset[int]
) -> list[Region]:
    """The regions, with why some rank does not compile those that belong to them."""
    found = of_all_ranks(_whys(regions), whys, lined_up)
    return [replace(one, why_not=found[one.name]) for one in regions]


def _whys(regions: Sequence[Region]) -> dict[str, str]:
    return {one.name: one.why_not for one in regions}


def _told(mine: Any) -> list[Any]:
    """What each rank says. Collective."""
    # What this rank says comes back by way of JSON, too: tuples of its own would differ from the
    # lists of others.
    return [json.loads(one) for one in gather_texts(json.dumps(mine))]
