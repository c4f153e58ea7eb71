"""Divides a backward in two by the shape of its graph alone, once for all like it.

Microbatches of one kind leave graphs that differ by their nodes only. So a graph is walked once per
backward, which gives its nodes numbers and writes down which leads to which; all that follows from
that is computed of numbers, and remembered.

Between the outputs of a stage and what it received lies the path: the nodes from which something
received is reached. Ends, which are those of parameters, hang on it by nodes beside it. An end's
places are where its gradient arrives last before it leaves the path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from torch.autograd.graph import GradientEdge, Node

from vescale_parallel._zero.gather import GatherUnit

Edge = tuple[int, int]
"""The number of a node, and that of the gradient that arrives at it."""

_BACKWARD_HOOK: Final = "BackwardHookFunctionBackward"
"""Type of the nodes that torch puts around a module with backward hooks."""
_UNIT: Final = f"{GatherUnit.__name__}Backward"
_ENDS: Final = frozenset({"AccumulateGrad", _UNIT})
"""Types of nodes behind which nothing is computed: all gradients go there at once, at the end."""


class Shape(NamedTuple):
    """A graph without its nodes.

    Attributes:
        roots: for each output its edge.
        received: numbers of the nodes of what the stage received, as far as they are reached.
        below: for each node its type, then the number of a node below and that of the gradient
            there, by turns. One flat tuple, as it is made in every backward.
    """

    roots: tuple[Edge, ...]
    received: tuple[int, ...]
    below: tuple[Any, ...]


class Round(NamedTuple):
    """Parameters that get their gradients by one run of the engine.

    Attributes:
        places: where the run starts.
        ends: what gets a gradient from there.
    """

    places: tuple[Edge, ...]
    ends: tuple[Edge, ...]


class BackwardCut(NamedTuple):
    """A backward in two halves.

    Attributes:
        is_whole: there are no halves: the first one is all of it.
        twice: ends whose gradients belong to the first half.
        noted: places on the path: what arrives there in the first half starts the second.
        beside: for each output whether it lies beside the path: its own gradient starts there.
        rounds: the second half.
    """

    is_whole: bool
    twice: tuple[Edge, ...]
    noted: tuple[Edge, ...]
    beside: tuple[bool, ...]
    rounds: tuple[Round, ...]


def walk(
    roots: Sequence[GradientEdge], received: Sequence[GradientEdge]
) -> tuple[list[Node], Shape]:
    """Return the nodes of a graph by number, and its shape.

    The order is that of the edges, so it is the same on all ranks of a stage: backwards
    communicate.

    Args:
        roots: of the outputs.
        received: of the leaves that the stage received.
    """
    numbers: dict[Node, int] = {}
    for one in roots:
        numbers.setdefault(one.node, len(numbers))
    nodes, below = list(numbers), list[Any]()
    for node in nodes:  # which grows
        kind = type(node)
        below.append(kind)
        if kind.__name__ in _ENDS:
            continue  # walking on would find the units' own nodes
        for child, number in node.next_functions:
            if child is None:
                continue
            at = numbers.get(child)
            if at is None:
                at = numbers[child] = len(nodes)
                nodes.append(child)
            below += (at, number)
    return nodes, Shape(
        tuple([(numbers[one.node], one.output_nr) for one in roots]),
        tuple([numbers[one.node] for one in received if one.node in numbers]),
        tuple(below),
    )


# By shape, of which a rank has one for each of its stages and kinds of microbatches.
@lru_cache(maxsize=32)
def cut_of(shape: Shape) -> BackwardCut:
    """Return where the backward of a graph is cut.

    With units it is not cut. Each run of the engine gathers the units that it needs, and how many
    runs there are depends on which kernels computed: a rank with one row, or none, has others. All
    of a stage run once, so they gather alike. Nothing is lost: what ends in one node as the
    parameters of a unit do would have the path run again for the second half.

    Nor where modules have backward hooks, which would be called in both halves, each time with a
    part of what they are promised.
    """
    graph = _Graph(shape)
    if graph.has_units or _BACKWARD_HOOK in graph.kinds:
        return BackwardCut(True, (), (), (), ())
    places = graph.places()
    # What reaches an end from one place, and on along the path from another one below, cannot be
    # told apart once the path has run.
    twice = {end: None for end, at in places.items() if graph.are_in_turn(at)}
    hanging = {end: tuple(at) for end, at in places.items() if end not in twice}
    noted = dict.fromkeys(at for every in hanging.values() for at in every if at[0] in graph.path)
    return BackwardCut(
        False,
        tuple(twice),
        tuple(noted),
        tuple([node not in graph.path for node, _ in shape.roots]),
        _rounds(hanging, graph),
    )


def _rounds(hanging: dict[Edge, tuple[Edge, ...]], graph: _Graph) -> tuple[Round, ...]:
    """Put ends together whose places do not lead to each other.

    From a place the engine goes wherever a wanted end is reached: so where one place leads to
    another, ends below the other would get what the path has brought there a second time.
    """
    depths_of = graph.depths({node for every in hanging.values() for node, _ in every})
    together: dict[Any, tuple[dict[Edge, None], list[Edge]]] = {}
    for end, at in hanging.items():
        depths = {depths_of[node] for node, _ in at}
        # Places at one depth never lead to each other. Of several depths only the same ones.
        key = depths.pop() if len(depths) == 1 else at
        starts, ends = together.setdefault(key, ({}, []))
        starts.update(dict.fromkeys(at))
        ends.append(end)
    return tuple(Round(tuple(starts), tuple(ends)) for starts, ends in together.values())


class _Graph:
    """The nodes between outputs and what was received, by number.

    Attributes:
        kinds: the name of each node's type.
        has_units: whether parameters are gathered from what ranks store.
        path: nodes from which something received is reached.
    """

    def __init__(self, shape: Shape) -> None:
        self._roots = shape.roots
        self.kinds: list[str] = []
        self._children: list[list[Edge]] = []
        below = iter(shape.below)
        for one in below:
            if isinstance(one, type):
                self.kinds.append(one.__name__)
                self._children.append([])
            else:
                self._children[-1].append((one, next(below)))
        self.has_units = _UNIT in self.kinds
        # Dicts for sets: their order is that of insertion, the same in every process.
        self._arrivals: list[dict[int, None]] = [{} for _ in self.kinds]
        for node, number in (*self._roots, *(at for every in self._children for at in every)):
            self._arrivals[node][number] = None
        self._downwards = self._sorted()
        self.path: set[int] = set()
        for node in reversed(self._downwards):
            if node in shape.received or any(
                child in self.path for child, _ in self._children[node]
            ):
                self.path.add(node)
        self._ends_of: dict[int, dict[Edge, None]] = {}

    def _sorted(self) -> list[int]:
        """All nodes, each before those below it."""
        done: dict[int, None] = {}
        # No recursion: a stage of a deep model has more nodes than Python has frames.
        left = [(root, False) for root, _ in self._roots]
        seen: set[int] = set()
        while left:
            node, has_children = left.pop()
            if has_children:
                done[node] = None
            elif node not in seen:
                seen.add(node)
                left.append((node, True))
                left += [(child, False) for child, _ in self._children[node]]
        return list(reversed(done))

    def depths(self, places: set[int]) -> list[int]:
        """For each node the number of these places above it, on the way that has most of them."""
        found = [0] * len(self.kinds)
        for node in self._downwards:
            depth = found[node] + (node in places)
            for child, _ in self._children[node]:
                found[child] = max(found[child], depth)
        return found

    def places(self) -> dict[Edge, dict[Edge, None]]:
        """For each end the places that it hangs on."""
        found: dict[Edge, dict[Edge, None]] = {}
        for node, children in enumerate(self._children):
            if node in self.path:
                at = [(node, number) for number in self._arrivals[node]]
                for child, number in children:
                    for end in self._ends(child, number):
                        found.setdefault(end, {}).update(dict.fromkeys(at))
        # Beside the path nothing arrives in the first half: there outputs start themselves.
        for node, number in self._roots:
            for end in self._ends(node, number):
                found.setdefault(end, {})[node, number] = None
        return found

    def _ends(self, node: int, number: int) -> list[Edge]:
        """What is reached beside the path from the gradient that arrives at a node."""
        if node in self.path:
            return []
        if self.kinds[node] in _ENDS:
            return [(node, number)]
        if node not in self._ends_of:
            # Below a node beside the path nothing is on it; recursion is as deep as what is
            # computed from parameters alone.
            self._ends_of[node] = {
                end: None for child in self._children[node] for end in self._ends(*child)
            }
        return list(self._ends_of[node])

    def are_in_turn(self, places: dict[Edge, None]) -> bool:
        """Whether one of these places leads to another one along the path."""
        # Outputs beside the path have no order among those on it.
        nodes = {node for node, _ in places if node in self.path}
        if len(nodes) < 2:
            return False
        for start in nodes:
            seen, left = {start}, [start]
            while left:
                for child, _ in self._children[left.pop()]:
                    if child in nodes and child is not start:
                        return True
                    if child in self.path and child not in seen:
                        seen.add(child)
                        left.append(child)
        return False
