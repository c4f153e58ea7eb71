"""Finds tensors between stages on which the loss depends: only they get gradients.

Where a later stage does not use what it received, one device leaves the parameters behind it
without gradients, and an optimizer leaves them alone; with gradients of zeros it would decay them.
Both sides of a boundary have to know, and no message tells: on a GPU it would be waited for. So it
is found in the graphs of a trial run, and all ranks of the mesh hear of those of all others: what
goes back is the same on every rank of a stage, or their backwards would not communicate alike.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.trace.microbatch_kinds import Entry, Kind, Reach

LOSS: Final = ""
"""What stands for the loss, where else there is the path of a tensor."""


def reaches_of(
    stage: int, given: Mapping[str, Tensor], received: Mapping[str, Tensor]
) -> list[Reach]:
    """What each tensor that a stage gives depends on, of what the stage received.

    Args:
        stage: its number.
        given: local tensors with their history: by path, or the loss.
        received: leaves, by path.
    """
    nodes = {p: get_gradient_edge(one).node for p, one in received.items() if one.requires_grad}
    return [
        (stage, path, _reached(get_gradient_edge(one).node, nodes))
        for path, one in given.items()
        if one.requires_grad
    ]


def _reached(root: Node, leaves: Mapping[str, Node]) -> tuple[str, ...]:
    seen = {root}
    left = [root]
    while left:
        for child, _ in left.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                left.append(child)
    return tuple(path for path, node in leaves.items() if node in seen)


def dependence_report(kinds: Iterable[Kind]) -> bytes:
    """What a rank tells the others of the graphs of its stages, for kinds in an order of all."""
    return json.dumps([one.reaches for one in kinds]).encode()


def agreed_kinds(
    kinds: Sequence[Kind], told: Mapping[int, bytes], pipeline: Sequence[int]
) -> list[Kind]:
    """The kinds, in which it is known what gradients come back from.

    Args:
        kinds: as they were told, all ranks in one order.
        told: by rank, what `dependence_report` gives there.
        pipeline: the ranks of this pipeline. Others have rows of their own, and may use more.
    """
    heard = {rank: json.loads(one) for rank, one in told.items()}
    # Of one process where there is nobody to talk to.
    own = [one for rank, one in heard.items() if rank in pipeline or len(heard) == 1]
    found = []
    for at, kind in enumerate(kinds):
        here = _used([reach for one in own for reach in one[at]], len(kind.ends))
        anywhere = _used([reach for one in heard.values() for reach in one[at]], len(kind.ends))
        entries = {}
        for stage, entry in kind.entries.items():
            alone = here[stage] - {path for there, path in kind.doubled if there == stage}
            backs, uses = _marks(entry, anywhere[stage]), _marks(entry, alone)
            entries[stage] = entry._replace(backs=backs, uses=uses)
        found.append(kind._replace(entries=entries, is_agreed=True))
    return found


def _used(reaches: Iterable[Reach], stages: int) -> dict[int, set[str]]:
    """By stage, what the loss depends on of that which the stage receives."""
    links: dict[tuple[int, str], set[str]] = {}
    for stage, path, below in reaches:
        links.setdefault((stage, path), set()).update(below)
    wanted, found = {LOSS}, dict[int, set[str]]()
    for stage in reversed(range(stages)):
        wanted = set[str]().union(*(links.get((stage, one), ()) for one in wanted))
        found[stage] = wanted
    return found


def _marks(entry: Entry, used: set[str]) -> tuple[bool, ...]:
    pairs = zip(entry.paths, entry.specs, strict=True)
    return tuple(spec.requires_grad and path in used for path, spec in pairs)


class _Place(NamedTuple):
    """A tensor that a stage receives, in microbatches of a kind."""

    stage: int
    path: str
    kind: int


class ReturnedGradients:
    """The gradients that stages of a rank send back in a step, and what was not there of them."""

    def __init__(self) -> None:
        self._missing: Counter[_Place] = Counter()

    def gradients(
        self, stage: int, kind: Kind, received: Sequence[Tensor], found: Iterable[Tensor | None]
    ) -> list[Tensor]:
        """Return what is sent to the stage before, which expects what the trial run found.

        Args:
            stage: that sends.
            kind: of the microbatch.
            received: what it got.
            found: the gradients of those that require one.

        Raises:
            PipelineError: there is one that the stage before does not expect.
        """
        paths, _, backs, uses = kind.entries[stage]
        sent, left = [], iter(found)
        for at, (one, goes) in enumerate(zip(received, backs, strict=True)):
            gradient = next(left) if one.requires_grad else None
            if goes and gradient is not None:
                sent.append(gradient)
            elif goes:
                # The stage before waits for it all the same.
                sent.append(torch.zeros_like(one))
                self._missing[_Place(stage, paths[at], id(kind))] += uses[at]
            elif gradient is not None:
                raise PipelineError(
                    f"stage {stage} uses {paths[at]} of the (args, kwargs) of its first block, "
                    f"and for the first batch of this shape the loss did not depend on it. {_ALIKE}"
                )
        return sent

    def problem(self, kinds: Iterable[Kind]) -> PipelineError | None:
        """What is wrong at the end of a step: zeros were sent for what has no gradient at all.

        Args:
            kinds: of the microbatches of the step. Where one of them has a gradient of a tensor,
                zeros of the others change nothing.
        """
        if not self._missing:
            return None
        counts = Counter(id(one) for one in kinds)
        for place, count in self._missing.items():
            if count == counts[place.kind]:
                return PipelineError(
                    f"no gradient comes back from {place.path} of the (args, kwargs) of the first "
                    f"block of stage {place.stage}, though the loss was computed from it for the "
                    "first batch of this shape (or by a function whose backward returns None for "
                    f"it). {_ALIKE} What has no gradient may be passed on with .detach()."
                )
        return None


_ALIKE: Final = (
    "Earlier stages have to know which gradients come back. The model has to compute alike for "
    "batches of one shape."
)
