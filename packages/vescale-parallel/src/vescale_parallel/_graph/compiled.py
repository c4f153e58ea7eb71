"""What lies between the collectives of a graph, compiled; what does not compile runs as it is.

Collectives, waits and random draws stay calls of the graph, in its order, so that what a schedule
has arranged stays arranged and streams of random numbers move as before. The runs of operators
between them are regions, each a graph of its own for `torch.compile`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module
from vescale_comm.agreement import gather_texts

from vescale_parallel._common.messages import listed, table
from vescale_parallel._errors import DisagreementError, GraphError
from vescale_parallel._graph.collectives import schema_name


@dataclass(frozen=True)
class Region:
    """Operators between two nodes that stay.

    Attributes:
        name: of its module in the graph.
        operations: how many it has.
        modules: of the model, that they are of, as far as that is known.
        why_not: why it runs as it is; empty if it is compiled.
    """

    name: str
    operations: int
    modules: tuple[str, ...]
    why_not: str = ""


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
            [one.name, str(one.operations), ", ".join(one.modules), one.why_not or "compiled"]
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
    graph's up to rounding. A value that several ranks compute for themselves is the same on them
    as long as their regions are; where graphs of ranks differ (uneven shards), compilers may round
    it otherwise on each.

    Args:
        graph: of `vescale_dtensor.joint`, `train_step(...).graph_module`, `schedule`, or of
            `make_fx` with functional collectives; nodes have fake tensors in `meta["val"]`. It
            stays as it is.
        backend: of `torch.compile`. Inductor needs a C++ compiler on CPUs.
        least_operations: regions with fewer, on any rank, are left as they are.

    Raises:
        DisagreementError: on every rank, if their regions, or these arguments, differ.
        GraphError: on every rank, if one cannot take its graph apart, or has no such backend.
    """
    fault, split = "", None
    regions: list[Region] = []
    modules: dict[str, fx.GraphModule] = {}
    try:
        _check_backend(backend)
        split = _split(graph)
        modules = dict(_regions(split))
        regions = [_region(name, one, least_operations) for name, one in modules.items()]
    except Exception as error:  # raised in `_agreed`, on all ranks: the others are on their way
        fault = f"{type(error).__name__}: {error}"
    options = {"backend": _name_of(backend), "least_operations": str(least_operations)}
    # Before anything is compiled, which may take minutes.
    regions = _agreed(regions, fault, options)
    assert split is not None
    made = {}
    for at, one in enumerate(regions):
        if not one.why_not:
            made[one.name], why = _compiled(modules[one.name], backend)
            regions[at] = replace(one, why_not=why)
    regions = _agreed(regions)
    for one in regions:
        if not one.why_not:
            setattr(split, one.name, made[one.name])
    split.recompile()
    return Compiled(split, tuple(regions))


def _region(name: str, module: fx.GraphModule, least_operations: int) -> Region:
    labels = (node.meta.get("label") for node in module.graph.nodes)
    modules = dict.fromkeys(str(getattr(label, "module", "")) for label in labels)
    count = sum(_computes(node) for node in module.graph.nodes)
    why = "few operations" if count < least_operations else ""
    return Region(name, count, tuple(filter(None, modules)), why)


def _check_backend(backend: str | Callable[..., Any]) -> None:
    known = torch.compiler.list_backends(exclude_tags=())
    if isinstance(backend, str) and backend not in known:
        raise GraphError(f"torch.compile has no backend {backend!r}, but {listed(known, 20)}")


def _name_of(backend: str | Callable[..., Any]) -> str:
    return backend if isinstance(backend, str) else getattr(backend, "__qualname__", "a callable")


def _split(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph as calls of modules: runs of operators, and runs of what stays."""
    numbers: dict[fx.Node, int] = {}
    now, stays = -1, None
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if stays is not _stays(node):
            now, stays = now + 1, _stays(node)
        numbers[node] = now
    made: fx.GraphModule = split_module(
        graph, graph, numbers.__getitem__, keep_original_order=True, partition_affix="region"
    )
    return made


def _stays(node: fx.Node) -> bool:
    """Whether a node is no operator of torch: a collective, a draw, or a Python function."""
    name = schema_name(node)
    return not name.startswith(("aten::", "prims::")) or _draws(node)


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function"


def _regions(split: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """The modules that hold operators only, in the order in which they are called."""
    for node in split.graph.nodes:
        if node.op != "call_module":
            continue
        module = split.get_submodule(str(node.target))
        if isinstance(module, fx.GraphModule) and not any(
            map(_stays, filter(_computes, module.graph.nodes))
        ):
            yield str(node.target), module


def _compiled(module: fx.GraphModule, backend: Any) -> tuple[Any, str]:
    """The module compiled for its shapes, or as it is, and why it cannot be."""
    try:
        inputs = [_zeros(node) for node in module.graph.nodes if node.op == "placeholder"]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler, about code that is not the user's
            made = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
            made(*inputs)
    except Exception as error:  # whatever a compiler raises: the region runs as it is
        said = " ".join(str(error).split("\n")[:2])  # the second line is of the backend's error
        return module, f"{type(error).__name__}: {said[:200]}"
    return made, ""


def _zeros(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        if value is None:
            raise GraphError(f"node '{node.name}' does not say what it is: it has no meta['val']")
        return value
    size = value.untyped_storage().nbytes() // max(1, value.itemsize)
    flat = torch.zeros(size, dtype=value.dtype, device=value.device)
    made = flat.as_strided(value.shape, value.stride(), value.storage_offset())
    # Compiled code is for inputs that ask for gradients, or for those that do not.
    return made.requires_grad_(value.requires_grad)


def _agreed(
    regions: Sequence[Region], fault: str = "", options: Mapping[str, str] | None = None
) -> list[Region]:
    """The regions, with why some rank cannot compile them: that is the same on all ranks.

    Raises:
        DisagreementError: their regions, or options, differ.
        GraphError: one has a fault.
    """
    mine = {"fault": fault, "options": options, "why": {one.name: one.why_not for one in regions}}
    told = [json.loads(one) for one in gather_texts(json.dumps(mine))]
    found: dict[str, str] = {}
    for rank, one in enumerate(told):
        if one["fault"]:
            raise GraphError(f"compile_regions, rank {rank}: {one['fault']}")
        if one["options"] != told[0]["options"]:
            raise DisagreementError(
                f"compile_regions: {one['options']} on rank {rank}, and {told[0]['options']} on "
                "rank 0. Pass the same on all ranks"
            )
        if [*one["why"]] != [*told[0]["why"]]:
            raise DisagreementError(
                f"compile_regions: rank {rank} has {len(one['why'])} regions, and rank 0 "
                f"{len(told[0]['why'])}: {listed(sorted({*one['why']} ^ {*told[0]['why']}))} are "
                "not on both. Graphs with other operators between their collectives are not "
                "compiled; run them as they are"
            )
        for name, why in one["why"].items():
            # What was agreed on before has its rank already.
            tells = why and len(told) > 1 and not why.startswith("rank ")
            found.setdefault(name, "")
            found[name] = found[name] or (f"rank {rank}: {why}" if tells else why)
    return [replace(one, why_not=found[one.name]) for one in regions]
