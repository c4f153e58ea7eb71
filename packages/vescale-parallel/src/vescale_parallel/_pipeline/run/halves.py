"""A backward in two halves: gradients of what a stage received, then those of its parameters.

Between the outputs of a stage and what it received lies a path of nodes. Parameters hang on it by
nodes beside the path. The first half runs the path, and notes what arrives where something hangs;
the second half runs from there to the parameters. torch's engine asks a node for those of its
gradients only that lead to what is wanted, so a product of a matrix is computed once for its input
and once for its weight, as in a whole backward.

The engine tells what is wanted by nodes, not by the gradients that arrive at one, so parameters
have to be leaves, each with its own node. Those of a unit all end in one: with units the first half
is all of the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from vescale_parallel._pipeline.run import backward_cut
from vescale_parallel._pipeline.run.backward_cut import Round, cut_of, walk

_Place = TypeVar("_Place", backward_cut.Edge, GradientEdge)


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
        self._roots = [get_gradient_edge(one) for one in outputs]
        self._starts = list(gradients)
        self._leaves: Sequence[Tensor] = received
        self._received = [get_gradient_edge(one) for one in received]
        self._nodes: list[Node] = []
        self._rounds: tuple[Round, ...] = ()
        self._arrived: dict[backward_cut.Edge, Tensor] = {}
        # Gradients of ends that are there already.
        self._found: list[tuple[GradientEdge, Tensor]] = []

    def inputs(self) -> list[Tensor | None]:
        """Return the gradients of what was received; None for what was not used."""
        if not self._received or not self._roots:
            return [None] * len(self._received)  # nobody waits: the second half is all of it
        self._nodes, shape = walk(self._roots, self._received)
        found = cut_of(shape)
        if found.is_whole:
            return self._whole()
        self._rounds = found.rounds
        twice = self._edges(found.twice)
        # One run of the engine for all: a second one would run the path again.
        gradients = _gradients(
            self._roots, self._starts, [*self._received, *twice, *self._edges(found.noted)]
        )
        first, second = len(self._received), len(self._received) + len(twice)
        self._found = _there(twice, gradients[first:second])
        self._arrived = dict(_there(found.noted, gradients[second:]))
        # What arrives at an output beside the path from elsewhere comes again in the second half.
        for at, start, is_beside in zip(shape.roots, self._starts, found.beside, strict=True):
            if is_beside:
                # An output may also be computed from another output: both gradients arrive there.
                before = self._arrived.get(at)
                self._arrived[at] = start if before is None else before + start
        return gradients[:first]

    def _whole(self) -> list[Tensor | None]:
        """Run all of it: nothing is left for the second half."""
        torch.autograd.backward(self._roots, self._starts)
        gradients = [one.grad for one in self._leaves]
        # All of it holds what the stage received.
        self._nodes, self._roots, self._starts = [], [], []
        self._leaves, self._received = (), []
        return gradients

    def weights(self) -> None:
        """Accumulate the gradients of everything else; releases the graph."""
        if not self._received:
            # The first stage receives nothing, so nothing was run in its first half; where all of
            # it was, nothing is left.
            found = list(zip(self._roots, self._starts, strict=True))
        else:
            found = self._found
            for one in self._rounds:
                self._run(one)
        if found:
            torch.autograd.backward([at for at, _ in found], [one for _, one in found])
        # The nodes hold saved tensors, and whoever keeps this object would keep them.
        self._nodes, self._rounds, self._arrived = [], (), {}
        self._found, self._roots = [], []

    def _run(self, one: Round) -> None:
        # What got no gradient starts nothing: None would be an error of the engine.
        places = [at for at in one.places if at in self._arrived]
        if not places:
            return
        roots, starts = self._edges(places), [self._arrived[at] for at in places]
        torch.autograd.backward(roots, starts, retain_graph=True, inputs=self._edges(one.ends))

    def _edges(self, numbers: Sequence[backward_cut.Edge]) -> list[GradientEdge]:
        nodes = self._nodes
        return [GradientEdge(nodes[node], number) for node, number in numbers]


def _gradients(
    roots: Sequence[GradientEdge], starts: Sequence[Tensor], wanted: Sequence[GradientEdge]
) -> list[Tensor | None]:
    found = torch.autograd.grad(roots, wanted, starts, retain_graph=True, allow_unused=True)
    return list(found)


def _there(
    places: Sequence[_Place], gradients: Sequence[Tensor | None]
) -> list[tuple[_Place, Tensor]]:
    return [(at, g) for at, g in zip(places, gradients, strict=True) if g is not None]
