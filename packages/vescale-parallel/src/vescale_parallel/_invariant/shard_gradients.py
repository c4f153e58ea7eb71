"""Gradients of one logical shard, taken where they arrive, and never summed over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn
from vescale_dtensor import gradient_total
from vescale_dtensor.storage import local_leaf

from vescale_parallel._common.messages import listed
from vescale_parallel._common.value_changes import CHECKED, SMALL, Before
from vescale_parallel._errors import ParallelError, StaleParameterError
from vescale_parallel._zero.schedule import Schedule
from vescale_parallel._zero.unit import Unit


class ShardRunner(Protocol):
    """Whoever runs the shards."""

    @property
    def running(self) -> bool: ...


class ShardGradients:
    """Gradients by the number of the parameter, from the units of `zero` and from `.grad`.

    Attributes:
        parameters: in the order of the model.
        in_units: numbers of those that units gather or cast: their gradients come from the unit.
        arrived: whether this rank has had a gradient of a parameter in this step.
    """

    def __init__(self, model: nn.Module, schedule: Schedule | None, step: ShardRunner) -> None:
        self.model, self._step = model, step
        self.parameters = list(model.parameters())
        # By identity: tied parameters are one, and `==` of tensors compares elements.
        self._number = {id(one): number for number, one in enumerate(self.parameters)}
        self._units = units = schedule.units if schedule is not None else []
        self.in_units = {self.number(one.stored) for unit in units for one in unit.held}
        self._found: list[Tensor | None] = [None] * len(self.parameters)
        self.arrived = [False] * len(self.parameters)
        self._steps = 0
        self._before: dict[str, Before] = {}
        for unit in units:
            # Units then hand their gradients over, and reduce nothing: the sum over ranks is the
            # tree's.
            unit.collect = self._collect

    def number(self, parameter: nn.Parameter) -> int:
        """Return the number of a parameter."""
        return self._number[id(parameter)]

    def _collect(self, unit: Unit, gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradients of a unit, in its backward."""
        if not self._step.running:
            raise ParallelError(
                "a backward outside of forward_backward: with deterministic='dp-invariant' there "
                "is no sum over ranks but its own. Call forward_backward(model, ...)."
            )
        for one, gradient in zip(unit.held, gradients, strict=True):
            number = self.number(one.stored)
            before = self._found[number]
            # A unit may be used more than once in a forward.
            if gradient is not None:
                self._found[number] = gradient if before is None else before + gradient

    def take(self) -> list[Tensor | None]:
        """Return the gradients of the shard that has run, and forget them.

        Collective where another axis than those of the batch owes sums, as `tp` does.
        """
        for number, parameter in enumerate(self.parameters):
            if number not in self.in_units and gradient_total(parameter) is not None:  # type: ignore[arg-type]
                self._found[number] = local_leaf(parameter).grad
                # Otherwise the next shard would be added to it, in the order of this rank and not
                # in that of the tree.
                parameter.grad = None
        found, self._found = self._found, [None] * len(self.parameters)
        had = zip(self.arrived, found, strict=True)
        # Over all shards of the step: a parameter that only some shards use has a gradient on every
        # rank at the end.
        self.arrived = [before or one is not None for before, one in had]
        return found

    @contextmanager
    def all_shards(self) -> Iterator[None]:
        """Put gradients of earlier backwards aside, and notice what forwards write to."""
        rest = [p for n, p in enumerate(self.parameters) if n not in self.in_units]
        # Accumulated gradients of earlier steps stay out of the tree: they are added to the
        # finished sum.
        before = [one.grad for one in rest]
        for one in rest:
            one.grad = None
        self._found = [None] * len(self.parameters)
        self.arrived = [False] * len(self.parameters)
        self._steps += 1
        self._before = {
            name: Before(one, copies=one.numel() <= SMALL or self._steps <= CHECKED)
            for name, one in self.model.named_buffers()
        }
        self._versions = self._parameters()
        for unit in self._units:
            unit.taken.clear()
        try:
            yield
        finally:
            self._before = {}
            self._found = [None] * len(self.parameters)
            for one, gradient in zip(rest, before, strict=True):
                one.grad = gradient

    def problem(self) -> str:
        """Return what was wrong with the forwards; empty if nothing was."""
        now = self._parameters()
        written = {name for name in now if now[name] != self._versions.get(name)}
        here = dict(self.model.named_buffers())
        gone = self._before.keys() ^ here.keys()
        written |= gone | {n for n, one in self._before.items() if one.has_changed(here.get(n))}
        written = written.union(*(unit.taken for unit in self._units))
        if not written:
            return ""
        return (
            f"forward has written to {listed(sorted(written))}. With deterministic='dp-invariant' "
            "each rank would hold what its own logical shards left there. Write to them outside "
            "of forward, or return what they collect with the loss."
        )

    def _parameters(self) -> dict[str, tuple[int, int]]:
        # Versions count writes in place; the identity tells one that was replaced.
        named = self.model.named_parameters()
        return {name: (id(one), local_leaf(one)._version) for name, one in named}

    def require_same_parameters(self) -> None:
        """Refuse parameters that were replaced or added.

        Raises:
            StaleParameterError: the model has other parameters than those that were parallelised.
        """
        now = list(self.model.parameters())
        # Compared by every rank from its own model, before the first collective of the step.
        if [id(one) for one in now] != [id(one) for one in self.parameters]:
            raise StaleParameterError(
                "the model has other parameters than parallelize left it with: their gradients "
                "would not be summed. Change the model first, then parallelize it."
            )
