"""A backward in two halves: gradients of what a stage received, then those of its parameters.

Between the outputs of a stage and what it received lies a path of nodes. Parameters hang on it by
nodes beside the path. The first half runs the path, and notes what arrives where something hangs;
the second half runs from there to the parameters. torch's engine asks a node for those of its
gradients only that lead to what is wanted, so a product of a matrix is computed once for its input
and once for its weight, as in a whole backward.

The engine tells what is wanted by nodes, not by the gradients that arrive at one: where several
parameters end in one node, as those of a unit do, the second half runs the path again for them: the
gradients are right, and the time is not saved. Plain parameters are leaves, each with its own node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from vescale_parallel._zero.gather import GatherUnit

Edge = tuple[Node, int]
"""A node, and the number of the gradient that arrives at it."""

_ENDS: Final = frozenset({"torch::autograd::AccumulateGrad", f"{GatherUnit.__name__}Backward"})
"""Names of nodes behind which nothing is computed: all gradients go there at once, at the end."""


class _Hanging(NamedTuple):
    """Ends that are reached from the same places, by which they get their gradients together.

    Attributes:
        places: where gradients arrive, on the path or, of an output beside it, at the output.
        ends: what gets a gradient from there.
    """

    places: tuple[Edge, ...]
    ends: tuple[Edge, ...]


class Halves:
    """The backward of one forward of a stage.

    Args:
        outputs: local tensors with a history.
        gradients: of the outputs.
        received: leaves, on which the outputs depend or not.
    """

    def __init__(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], received: Sequence[Tensor]
    ) -> None:
        self._roots = [_edge_of(one) for one in outputs]
        self._starts = list(gradients)
        self._received = [_edge_of(one) for one in received]
        self._hanging: list[_Hanging] = []
        self._arrived: dict[Edge, Tensor] = {}
        # Gradients of ends that are there already.
        self._found: list[tuple[Edge, Tensor]] = []

    def inputs(self) -> list[Tensor | None]:
        """Return the gradients of what was received; None for what was not used."""
        if not self._received or not self._roots:
            return [None] * len(self._received)  # nobody waits: the second half is all of it
        graph = _Graph(self._roots, {node for node, _ in self._received})
        self._hanging, twice = graph.hanging()
        # Without duplicates, and in one order: the engine is asked for each gradient once.
        places = list(dict.fromkeys(at for one in self._hanging for at in one.places))
        # Beside the path nothing arrives in the first half: there the outputs' own gradients start.
        on_path = [at for at in places if at[0] in graph.path]
        wanted = [*self._received, *twice, *on_path]
        # One run of the engine for all: a second one would run the path again.
        found = _gradients(self._roots, self._starts, wanted)
        count = len(self._received)
        self._found = _there(twice, found[count : count + len(twice)])
        self._arrived = dict(_there(on_path, found[count + len(twice) :]))
        # What arrives at an output beside the path from elsewhere comes again in the second half.
        for at, start in zip(self._roots, self._starts, strict=True):
            if at[0] not in graph.path:
                # An output may also be computed from another output: both gradients arrive there.
                before = self._arrived.get(at)
                self._arrived[at] = start if before is None else before + start
        return found[:count]

    def weights(self) -> None:
        """Accumulate the gradients of everything else; lets go of the graph.

        With units that reduce gradients this is the collective.
        """
        if not self._received:
            # The first stage receives nothing, so nothing was run in its first half.
            found = [(at, one) for at, one in zip(self._roots, self._starts, strict=True)]
        else:
            found = self._found
            for one in self._hanging:
                # What got no gradient starts nothing: None would be an error of the engine.
                starts = [(at, self._arrived[at]) for at in one.places if at in self._arrived]
                if starts:
                    roots, values = zip(*starts, strict=True)
                    found += _there(one.ends, _gradients(roots, values, one.ends))
        if found:
            torch.autograd.backward(
                [GradientEdge(*at) for at, _ in found], [one for _, one in found]
            )
        # The nodes hold saved tensors, and whoever keeps this object would keep them.
        self._hanging, self._arrived, self._found, self._roots = [], {}, [], []


class _Graph:
    """The nodes between outputs and leaves.

    Attributes:
        path: nodes from which a received leaf is reached.
    """

    def __init__(self, roots: Sequence[Edge], received: set[Node]) -> None:
        self._roots = roots
        # Insertion order is that of the walk, the same on all ranks of a stage: backwards
        # communicate.
        self._children: dict[Node, list[Edge]] = {}
        # Dicts for sets: their order is that of insertion, the same in every process.
        self._arrivals: dict[Node, dict[int, None]] = {}
        self.path: set[Node] = set()
        self._ends_of: dict[Node, dict[Edge, None]] = {}
        for node, number in roots:
            self._arrivals.setdefault(node, {})[number] = None
            self._walk(node, received)

    def _walk(self, root: Node, received: set[Node]) -> None:
        """Visit what is below a node, children first."""
        # No recursion: a stage of a deep model has more nodes than Python has frames.
        left = [(root, False)]
        while left:
            node, is_done = left.pop()
            if is_done:
                if node in received or any(child in self.path for child, _ in self._children[node]):
                    self.path.add(node)
                continue
            if node in self._children:
                continue
            # Behind an end nothing is computed; walking on would find the units' own nodes.
            below = [] if _is_end(node) else _below(node)
            self._children[node] = below
            for child, number in below:
                self._arrivals.setdefault(child, {})[number] = None
            left.append((node, True))
            left += [(child, False) for child, _ in below]

    def hanging(self) -> tuple[list[_Hanging], list[Edge]]:
        """Return ends by the places that they hang on, and those that hang on the path in turn.

        What reaches an end from one place, and on along the path from another one below, cannot be
        told apart once the path has run: such gradients belong to the first half.
        """
        places: dict[Edge, dict[Edge, None]] = {}
        for node in self._children:
            if node in self.path:
                at = [(node, number) for number in self._arrivals[node]]
                for child, number in self._children[node]:
                    for end in self._ends(child, number):
                        places.setdefault(end, {}).update(dict.fromkeys(at))
        for node, number in self._roots:
            for end in self._ends(node, number):
                places.setdefault(end, {})[node, number] = None
        # Ends with two places of which one lies below the other.
        twice = {end: None for end, at in places.items() if self._is_in_turn(at)}
        # Those that hang on the same places run together, so that what leads to all of them runs
        # once.
        together: dict[tuple[Edge, ...], list[Edge]] = {}
        for end in [one for one in places if one not in twice]:
            together.setdefault(tuple(places[end]), []).append(end)
        return [_Hanging(at, tuple(ends)) for at, ends in together.items()], list(twice)

    def _ends(self, node: Node, number: int) -> list[Edge]:
        """What is reached beside the path from the gradient that arrives at a node."""
        if node in self.path:
            return []
        if _is_end(node):
            return [(node, number)]
        if node not in self._ends_of:
            # Below a node beside the path nothing is on it; recursion is as deep as what is
            # computed from parameters alone.
            self._ends_of[node] = {
                end: None for child in self._children[node] for end in self._ends(*child)
            }
        return list(self._ends_of[node])

    def _is_in_turn(self, places: dict[Edge, None]) -> bool:
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


def _edge_of(tensor: Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _below(node: Node) -> list[Edge]:
    return [(child, number) for child, number in node.next_functions if child is not None]


def _is_end(node: Node) -> bool:
    return node.name() in _ENDS


def _gradients(
    roots: Sequence[Edge], starts: Sequence[Tensor], wanted: Sequence[Edge]
) -> list[Tensor | None]:
    return list(
        torch.autograd.grad(
            [GradientEdge(*at) for at in roots],
            [GradientEdge(*at) for at in wanted],
            starts,
            retain_graph=True,
            allow_unused=True,
        )
    )


def _there(places: Sequence[Edge], gradients: Sequence[Tensor | None]) -> list[tuple[Edge, Tensor]]:
    return [(at, g) for at, g in zip(places, gradients, strict=True) if g is not None]
