"""One forward of one stage for one microbatch: the model's own code, up to the stage's last block.

The model calls its modules; `units` tells this object of each call of a block, and of each call of
a module outside of the blocks that holds parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from vescale_comm import CommError
from vescale_comm.nested import named_tensors_within

from vescale_parallel._common.messages import listed
from vescale_parallel._common.torch_compat import innermost_mode
from vescale_parallel._errors import ParallelError, PipelineError
from vescale_parallel._pipeline.run.boundary import require_values
from vescale_parallel._pipeline.run.rank_stages import Neighbours, RankStages, StageEnded, Unit
from vescale_parallel._pipeline.run.route_calls import RouteCalls
from vescale_parallel._pipeline.trace.foreign_values import ForeignValues
from vescale_parallel._pipeline.trace.hook_results import call_hooks, failed_outside
from vescale_parallel._pipeline.trace.leaks import Leaks
from vescale_parallel._pipeline.trace.microbatch_kinds import Call, Kind
from vescale_parallel._pipeline.trace.module_attributes import AttributeValue, StandingIn, left_by
from vescale_parallel._pipeline.trace.placeholders import CAN_STAND
from vescale_parallel._pipeline.trace.results import Results
from vescale_parallel._pipeline.trace.route import Act, RouteFollower, Routes, Turn
from vescale_parallel._pipeline.trace.streams import Place, after, drawn_otherwise, words_between
from vescale_parallel._pipeline.trace.tensor_specs import (
    Blanks,
    NestedSpecs,
    describe,
    placeholders,
    wrapped,
)
from vescale_parallel._pipeline.trace.unit_calls import UnitCalls
from vescale_parallel._step.parts import Part, loss_of


class StageForward:
    """One forward of one stage.

    Attributes:
        received: what came from the stage before: leaves that get gradients.
        sent: what went to the stage after, with its history.
        places: by path of what was received, for which object it is put, in a trial run.
        measured: calls of this stage's units, in a trial run.
        is_still: whether nothing is drawn, as whoever runs it finds out.
        quiet: what answers calls of units, as long as no function has to be watched.
    """

    def __init__(
        self,
        scene: RankStages,
        stage: int,
        kind: Kind,
        neighbours: Neighbours,
        blanks: Blanks | None = None,
        routes: Routes | None = None,
    ) -> None:
        self.scene, self.stage, self.kind, self._neighbours = scene, stage, kind, neighbours
        # None in a trial run, where values of other stages are looked for by what is in them.
        self._blanks = blanks
        self.received: list[Tensor] = []
        self.sent: list[Tensor] = []
        self.places: dict[str, int] = {}
        self.measured: dict[tuple[str, int], Call] = {}
        # The dtype of the loss is the last thing that a trial run finds out.
        self.is_trial = kind.loss is None
        self.is_still = False
        self.foreign = ForeignValues(stage, Leaks() if self.is_trial else None)
        self._called = UnitCalls(scene.block_numbers, stage)
        # Where the forward began; and units, in a trial run.
        self._start: Place = ()
        self._places: dict[tuple[str, int], Place] = {}
        self._is_last = stage + 1 == len(scene.split.stages)
        # The unit of this rank that is called with what only other stages know.
        self._lacks: str | None = None
        self._left = StandingIn()
        # Whether functions come to `foreign`; whether none has to, as tensors tell of their uses.
        self._looks = False
        self.quiet: RouteCalls | None = None
        self._results = Results(self.foreign, stage, kind.uses, self.is_trial)
        self._way = RouteFollower(stage, routes)
        if blanks is not None and self._way.is_quiet and not scene.collects | scene.is_compiled:
            self._modes = innermost_mode()
            blanks.watchers[:] = [self]
            self.quiet = self._calmed = RouteCalls(self, self._way, self.foreign)
        self._foreign_to = scene.foreign_to[stage]
        self._can_repeat = False

    def again(self) -> bool:
        """Be the forward of the next microbatch of this kind, if it can begin as this one did.

        To make a new one takes as long as a call of a module; and by then it is known what stands
        in at each turn, and where in the arguments tensors are that pass between stages.
        """
        blanks, can_repeat = self._blanks, self._can_repeat
        if (
            blanks is None
            or not can_repeat
            or blanks.is_written
            or innermost_mode() is not self._modes
        ):
            return False
        self._way.at = 0
        self.quiet, self._can_repeat = self._calmed, False
        blanks.watchers[:] = [self]
        return True

    def let_go(self) -> tuple[list[Tensor], list[Tensor]]:
        """What was received and sent, which only who goes backward holds from now on."""
        found = self.received, self.sent
        self.received, self.sent = [], []
        return found

    def run(self, part: Part, start: Place | None = None) -> Tensor | None:
        """Run the model up to the end of the stage; returns the loss on the last one.

        Args:
            part: its arguments.
            start: where the streams stand; None: that is looked up.
        """
        self.scene.running = self
        self._start = self.scene.streams.here() if start is None else start
        try:
            with self.scene.held:
                self._look()
                found = loss_of(part, self._output(part))
                # A loss of shape (1,) is one of torch's scalars too; sums and messages need one
                # form.
                found = found.reshape(()) if found.ndim else found
                self._require_end(found)
                self._require_draws()
                self._ended()
                return found
        except StageEnded:
            # Not only to return: what the model has put in `finally` blocks runs, as after an
            # error. It has come to the next stage's first block.
            self._ended()
        finally:
            self._look_away()
            # Nothing has happened that a route does not tell: no activation is held, either.
            self._can_repeat = self.quiet is not None and self._way.is_done()
            self.quiet = None
            self.foreign.known.clear()
            if self._blanks is not None:
                self._blanks.watchers.clear()  # this forward holds its activations
            self._left.restore()
            # Whoever calls the model afterwards, as to evaluate it on one rank, is not a stage.
            self.scene.running = None
            if self.foreign.leaks is not None and self.foreign.leaks.recomputes:
                self.scene.recomputing.add(self.stage)
        return None

    def _ended(self) -> None:
        if self._way.left:
            alone = self.scene.mesh.size() == 1
            is_quiet = alone and self.kind.is_plain and not self.foreign.is_touched
            self._way.ended(is_quiet=CAN_STAND and is_quiet)

    def begin_to_look(self) -> bool:
        """A function takes what stands for a value of another stage, which none did before.

        Returns:
            Whether functions come to `foreign` now, and did not before.
        """
        if self.quiet is None:
            return False
        if innermost_mode() is not self._modes:
            raise PipelineError(
                f"between its blocks the model computes with values of other stages than "
                f"{self.stage}, and did not for a batch of this shape before. Inside of a mode "
                "of its own (torch.device, DeviceContext) this cannot be watched from here on."
            )
        self.quiet = None
        self._way.drop()
        self._look()
        return True

    def _look(self) -> None:
        if self._looks or self.quiet is not None:
            return
        # Without values of other stages there is nothing to be told apart.
        if self.foreign.leaks is not None or self.foreign.has_marked:
            self.foreign.__enter__()  # type: ignore[no-untyped-call]
            self._looks = True

    def _look_away_here(self) -> None:
        """Look away until the next `_look` of the same depth, unless modes of the model run."""
        if self._looks and innermost_mode() is self.foreign:
            self._look_away()

    def _look_away(self) -> None:
        if self._looks:
            self.foreign.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._looks = False

    def _output(self, part: Part) -> Any:
        try:
            call = self.scene.call or self.scene.model
            return call(*part.args, **part.kwargs)
        except (ParallelError, CommError, StageEnded):
            raise
        except Exception as error:
            leaks = self.foreign.leaks
            if not self.stage or leaks is None or leaks.inside is not None:
                raise
            raise failed_outside(self.stage, error) from error

    def _require_end(self, loss: Tensor) -> None:
        is_done = self._way.is_done()
        if not is_done:
            self._look_closely()
        self._called.require_all(has_followed=is_done, is_last=self._is_last)
        if self.foreign.is_unknown(loss):
            raise PipelineError(
                "the loss is computed from values that only earlier stages have, beside what went "
                "through the blocks. Let the blocks pass them on, or let every stage hold what "
                "makes them: Pipeline(everywhere=...)."
            )

    def call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model calls a unit before which nobody has been called; returns its result."""
        turn = self._way.due(unit.name)
        if turn is not None and unit.leaves and not self.scene.collects:
            if turn.act == "run" and self.foreign.is_plainly_known(args, kwargs):
                self._look_away_here()
                output = unit.forward(*args, **kwargs)
                self._look()
                return output
            if turn.act == "stand in":
                return self.stand_in_at(turn)
        return self.call_at(turn, unit, args, kwargs)

    def call_at(
        self, turn: Turn | None, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Enter and compute a unit, for which it is the turn, or nobody knows."""
        if unit.module._forward_pre_hooks:
            self._require_no_difference(unit, args, kwargs)
        given = self._entered(turn, unit.name, args, kwargs)
        return self.compute(unit, *given)

    def _require_no_difference(self, unit: Unit, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse hooks that have come since the step began, where they have seen placeholders."""
        is_first = self.scene.block_numbers.get(unit.name) in self.scene.starts[1:-1]
        if is_first or not self.foreign.is_plainly_known(args, kwargs):
            raise PipelineError(
                f"a forward pre-hook was registered on '{unit.name}' while the model ran, and has "
                "seen what stands for values of other stages. Register it before forward_backward."
            )

    def compute(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit that has been entered, or return a placeholder of its result."""
        if self.is_foreign(unit.name):
            return self.stand_in(unit.name)
        output = unit.forward(*args, **kwargs)
        if unit.leaves:
            self.leave(unit.name, output)
        return output

    def enter(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model calls a unit."""
        return self._entered(self._way.due(name), name, args, kwargs)

    def _entered(
        self, turn: Turn | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if turn is not None and turn.act == "stand in":
            return self.foreign.resolved((args, kwargs)) if self.foreign.known else (args, kwargs)
        # What is done here is none of the model's functions.
        self._look_away_here()
        given = self.foreign.resolved((args, kwargs))
        if turn is not None:
            self._results.begin(name, turn.number)
            if turn.act == "take over":
                return self._take_over(*given)
            if turn.act == "give":
                self._give(*given)
            if not self.foreign.unknown_within(given):
                return given  # type: ignore[no-any-return]
        self._look_closely(before=turn is not None)
        return self._enter(name, *given)

    def _look_closely(self, *, before: bool = False) -> None:
        """From here on find out at each call of a unit what is to be done there."""
        self.quiet = None
        if not self._way.left:
            self._called.note(self._way.leave(before=before))

    def _enter(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        key = self._called.one(name)
        number = self.scene.block_numbers.get(name)
        act: Act = "run"
        if number is not None:
            # Before the block itself: its hooks belong to the stage that holds it.
            if number == self.scene.starts[self.stage + 1]:
                self._way.note(Turn(name, "give", key[1]))
                self._give(args, kwargs)
            if self.stage and number == self.scene.starts[self.stage]:
                act = "take over"
                args, kwargs = self._take_over(args, kwargs)
        self._lacks = name if number is None and self._can_stand_in(key, args, kwargs) else None
        if self._lacks is not None:
            self._way.forget()  # by what it is called with, which no route tells
        if self.is_foreign(name):
            self._way.note(Turn(name, "stand in", key[1], self.kind.calls.get(key)))
            self._look()
            return args, kwargs
        # All that a unit of this stage is given is known, and so is what it computes.
        self._require_known(name, args, kwargs)
        self._way.note(Turn(name, act, key[1]))
        self._results.begin(*key)
        if self.is_trial:
            self._places[key] = self.scene.streams.here()
        if self.foreign.leaks is not None:
            self._look()
            if number is not None:
                self.foreign.leaks.inside = name
        return args, kwargs

    def _give(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        """Hand over to the next stage: this one has come to its end."""
        call = named_tensors_within((args, kwargs))
        if self.quiet is not None:
            self.quiet.same.note_handed(args, kwargs, list(call))
        self.hand_over(call | self._results.to_give())

    def hand_over(self, call: dict[str, Tensor]) -> NoReturn:
        self._require_draws()
        self.sent = self._neighbours.give(self.stage, call, self.foreign)
        raise StageEnded

    def is_foreign(self, name: str) -> bool:
        """Whether the unit that is called now returns placeholders."""
        return name in self._foreign_to or name == self._lacks

    def _can_stand_in(
        self, key: tuple[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether a module between blocks runs for another stage of this rank, as in a V."""
        call = self.kind.calls.get(key)
        if call is None or call.output is None:
            return False
        return bool(self.foreign.unknown_within((args, kwargs)))

    def _require_known(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        unknown = self.foreign.unknown_within((args, kwargs))
        if unknown:
            raise PipelineError(
                f"'{name}' on stage {self.stage} takes values that only other stages have: "
                f"{listed(unknown)} of its (args, kwargs). What passes between stages are the "
                "arguments of their first block; let every stage hold what makes these: "
                "Pipeline(everywhere=...)."
            )
        if self.is_trial and self.stage:
            require_values(name, self.stage, (args, kwargs))

    def _take_over(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Receive what the first block of this stage is called with."""
        found = named_tensors_within((args, kwargs))
        unknown = [path for path, one in found.items() if self.foreign.is_unknown(one)]
        more = self._results.to_take()
        found, unknown = found | more, [*unknown, *more]
        if self.is_trial:
            # A result of a module may be an argument as well: of these the last one is used.
            self.places = {path: id(found[path]) for path in unknown}
        for path, one in zip(unknown, self.taken(unknown), strict=True):
            self.foreign.known[id(found[path])] = one
        if self.quiet is not None and not more:
            self.quiet.same.note_lacking(args, kwargs, unknown)
        return self.foreign.resolved((args, kwargs))  # type: ignore[no-any-return]

    def taken(self, unknown: list[str]) -> list[Tensor]:
        """What the stage before has sent, in place of what is missing at these paths."""
        entry, values = self._neighbours.ask(self.stage, unknown)
        if list(entry.paths) != unknown:
            raise PipelineError(
                f"stage {self.stage} lacks {listed(unknown) or 'nothing'} of the arguments of its "
                f"first block, and in its trial run it lacked {listed(entry.paths) or 'nothing'}. "
                "The model has to call its blocks alike for batches of one shape."
            )
        taken = []
        for spec, local in zip(entry.specs, values, strict=True):
            if spec.requires_grad and torch.is_grad_enabled():
                local.requires_grad_()
            # The leaf, and not the wrapper: gradients of the stage before are read from it.
            self.received.append(local)
            taken.append(wrapped(spec, local, self.scene.mesh))
        return taken

    def leave(self, name: str, output: Any) -> None:
        """A unit of this stage has run."""
        self._look()
        inner = self._results.end(output, collects=self.scene.collects)
        if not self._way.left:
            return
        key = self._called.latest(name)
        left: tuple[AttributeValue, ...] = ()
        if self.foreign.leaks is not None and name == self.foreign.leaks.inside:
            left = left_by(self.scene.model.get_submodule(name), self.foreign.leaks.is_made)
            self.foreign.leaks.returned(named_tensors_within(output).values())
        if self.is_trial:
            start, end = self._places.pop(key), self.scene.streams.here()
            words = words_between(start, end, f"'{name}'")
            described = None if self._is_last else describe(output)
            self.measured[key] = Call(words, described, left, inner)
            return
        if key not in self.kind.calls:
            raise PipelineError(
                f"'{name}' is called more often than it was for a batch of this shape before, so "
                "that other stages cannot know what it draws. The model has to call its modules "
                "alike for batches of one shape."
            )

    def _require_draws(self) -> None:
        """Refuse a stage that has drawn other numbers than others pass for it."""
        if self.is_trial or self.is_still:
            return
        # Once for a stage and not for each unit: those within are in the model's own order.
        if after(self._start, self.kind.ends[self.stage]) != self.scene.streams.here():
            raise drawn_otherwise(self.scene.split.stages, [self.stage])

    def stand_in(self, name: str) -> Any:
        """What a unit of another stage returns here."""
        turn = self._way.now(name)
        return self._stand_in_closely(name) if turn is None else self.stand_in_at(turn)

    def stand_in_at(self, turn: Turn) -> Any:
        """The same, at a turn of the route."""
        call: Call | None = turn.call
        if call is None or call.output is None or self._blanks is None:
            return self._stand_in_closely(turn.name)
        draws = any(call.words)
        known = None if draws else self._blanks.ready(call.output, tells=self.quiet is not None)
        if known is not None and not self.scene.collects:
            # By far the most: without a call for each of the steps below.
            self.foreign.mark(known[1])
            if self.quiet is None:
                self._look()
            elif isinstance(known[0], Tensor):
                self.quiet.ready[id(turn)] = known[0]
            return known[0]
        self._look_away_here()
        self.scene.streams.skip(call.words)
        found = self._blanks.stand_in(call.output, self.scene.mesh, tells=self.quiet is not None)
        return self._stood_in((turn.name, turn.number), call, *found)

    def _stand_in_closely(self, name: str) -> Any:
        self._look_closely()
        call = self.kind.calls.get(self._called.latest(name))
        if call is None or call.output is None:
            raise PipelineError(
                f"'{name}' is on another stage, and stage {self.stage} needs it: it lies where it "
                "is registered, or where a call by inputs= uses it. Pass parallelize(inputs=...), "
                f"or let every stage hold it: Pipeline(everywhere='{name}')."
            )
        self._look_away_here()
        # As if it had run: what comes after it draws the numbers that one device draws there.
        self.scene.streams.skip(call.words)
        value, made = placeholders(call.output, self.scene.mesh, self._blanks)
        if self.is_trial and call.left:
            block = self.scene.model.get_submodule(name)
            made = made + self._left.put(block, call.left, self.scene.mesh)
        return self._stood_in(self._called.latest(name), call, value, made)

    def _stood_in(
        self, unit: tuple[str, int], call: Call, value: Any, made: Sequence[Tensor]
    ) -> Any:
        """Mark what stands for a result, and let hooks within the unit collect what they do."""
        self.foreign.mark(made)
        if not self.scene.collects:
            self._look()
            return value
        self._look_away_here()
        calls = self._results.stand_in(unit, call, value, self._standing)
        self._look()
        block = self.scene.model.get_submodule(unit[0])
        for module, given, output in calls:
            where = f"'{unit[0]}.{module}' on stage {self.stage}"
            call_hooks(block.get_submodule(module), given, output, where)
        return value

    def _standing(self, described: NestedSpecs) -> tuple[Any, list[Tensor]]:
        if self._blanks is None:
            return placeholders(described, self.scene.mesh)
        return self._blanks.stand_in(described, self.scene.mesh)

    def within(self, unit: str, name: str, given: Any, output: Any) -> None:
        """A module within a block has returned, on which hooks are."""
        self._look_away_here()
        self._results.within(unit, name, given, output)
        self._look()

    def known(self, output: Any) -> Any:
        """What the model returned, with what has come from other stages in its place."""
        return self._results.known(output)
