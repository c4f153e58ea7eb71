"""Finds by one forward what stages exchange and draw for a kind of microbatch.

The stages run one after another on the first microbatch of each shape, and every rank hears what
they did. Afterwards random generators and the state of modules are what they were. In the step
itself nothing but tensors has to be sent, and each stage knows where in the stream its draws lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import Tensor
from vescale_comm import CommError
from vescale_comm.generators import States, generators_of
from vescale_dtensor import DTensor
from vescale_dtensor.storage import local_leaf

from vescale_parallel._common.messages import listed
from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.run.boundary import handed_over
from vescale_parallel._pipeline.run.measurements import KeptBytes
from vescale_parallel._pipeline.run.messages import Lines
from vescale_parallel._pipeline.run.rank_stages import RankStages
from vescale_parallel._pipeline.run.stage import StageForward
from vescale_parallel._pipeline.run.stage_parameters import HeldParameters
from vescale_parallel._pipeline.run.state_writes import writes_of
from vescale_parallel._pipeline.trace.foreign_values import ForeignValues
from vescale_parallel._pipeline.trace.loss_dependence import LOSS, reaches_of
from vescale_parallel._pipeline.trace.microbatch_kinds import (
    Entry,
    Kind,
    Reach,
    RepeatedError,
    is_in_hook,
    is_lacking,
    trimmed,
)
from vescale_parallel._pipeline.trace.module_state import Place, State
from vescale_parallel._pipeline.trace.streams import words_between
from vescale_parallel._pipeline.trace.tensor_specs import local_of, spec_of
from vescale_parallel._pipeline.trace.text import add_record, to_text
from vescale_parallel._step.parts import Part
from vescale_parallel._zero.schedule import zero_schedule_of


@add_record
class StageReport(NamedTuple):
    """What a stage tells all ranks after its forward.

    Attributes:
        failure: why it has no more to tell, or nothing.
        kind: what it found.
        lacks: whether it failed for want of what modules within blocks compute.
        in_hook: whether it failed in a hook within a block of another stage.
    """

    failure: str
    kind: Kind
    lacks: bool = False
    in_hook: bool = False


class TrialRun:
    """One forward of all stages, one after another.

    Args:
        scene: this rank's part.
        lines: its connections.

    Attributes:
        problem: of a forward that has run, why no step may, as far as this rank knows.
    """

    def __init__(self, scene: RankStages, lines: Lines) -> None:
        self._scene, self._lines = scene, lines
        self._state = State(scene.model)
        self._others = States(generators_of(scene.model))
        self._given: dict[int, tuple[Mapping[str, Tensor], ForeignValues]] = {}
        self._received: dict[int, tuple[dict[str, int], list[Tensor]]] = {}
        self._loss: Tensor | None = None
        # By stage, which tensors functions took, and which of modules' were written to.
        self._taken: dict[int, set[int]] = {}
        self._changed: dict[int, set[int]] = {}
        self.problem: PipelineError | None = None
        self._asked: set[int] = set()
        self._handles: list[Any] = []

    def run(self, part: Part) -> Kind:
        """Return what is known of microbatches like `part`.

        Raises:
            PipelineError: on every rank of this pipeline, where a stage fails; on that one the
                error itself.
        """
        kind = Kind({}, {}, {})
        scene = self._scene
        start = scene.streams.here()
        try:
            for stage, rank in enumerate(scene.split.ranks):
                kind = self._stage(stage, rank, kind, part)
                # Each stage runs the model from its beginning, and draws or skips all of it: one
                # stage behind another has to begin where the microbatch does.
                scene.streams.seek(start)
            self.problem = self._own_state_problem(kind)
            doubled = tuple([(at, path) for at in self._received for path in self._doubled(at)])
            return trimmed(kind)._replace(reaches=tuple(self._reaches(kind)), doubled=doubled)
        finally:
            scene.streams.seek(start)
            self._others.restore()
            self._state.restore()
            # It holds the graphs of all stages of this rank.
            self._given.clear()
            self._received.clear()
            self._loss = None
            # Without this the last messages could be freed while they are still on their way.
            for one in self._handles:
                one.wait()

    def _reaches(self, kind: Kind) -> list[Reach]:
        """What gradients of this rank's stages lead to, of what each received."""
        found: list[Reach] = []
        for stage, (places, values) in self._received.items():
            if stage in self._given:
                call, _ = self._given[stage]
                given = {path: call[path] for path in kind.entries[stage + 1].paths}
            else:
                given = {} if self._loss is None else {LOSS: self._loss}
            locals_ = {path: local_of(one) for path, one in given.items()}
            for at, path, below in reaches_of(
                stage, locals_, dict(zip(places, values, strict=True))
            ):
                # Of those for one object it is not known which will be used, with fewer of them.
                used = {places[one] for one in below}
                found.append((at, path, tuple([p for p, one in places.items() if one in used])))
        return found

    def _own_state_problem(self, kind: Kind) -> PipelineError | None:
        """What is wrong with tensors in modules that stages do not have for themselves."""
        for stage, taken in self._taken.items():
            own = {one.place for one in kind.writes if one.stage == stage}
            others = [one.place for one in kind.writes if one.place not in own]
            found = _names(self._state.among(taken, others))
            if found:
                return PipelineError(
                    f"stage {stage} reads {listed(found)}, to which a forward of another stage "
                    "writes: it would find what was there before the step. Let blocks return it, "
                    "or read it between two steps."
                )
        for stage, changed in self._changed.items():
            found = _names(self._shared(kind, stage, changed))
            if found:
                return PipelineError(
                    f"blocks of several stages hold {listed(found)} and write to it: each would "
                    "go on from what was there before the step. Give each block its own."
                )
        return None

    def _shared(self, kind: Kind, stage: int, changed: set[int]) -> list[Place]:
        """Where a tensor is that a stage and others write, and blocks of several stages hold."""
        scene, state = self._scene, self._state
        others = state.among(changed, {one.place for one in kind.writes if one.stage != stage})
        if not others:
            return []
        holders: dict[int, set[int]] = {}
        for at, blocks in enumerate(scene.split.stages):
            for name in blocks:
                for module in scene.model.get_submodule(name).modules():
                    holders.setdefault(id(module), set()).add(at)
        for one in changed:
            places = state.among({one}) if state.among({one}, others) else []
            modules = [scene.model.get_submodule(place.module) for place in places]
            if len(set().union(*(holders.get(id(m), ()) for m in modules))) > 1:
                return places
        return []

    def _doubled(self, stage: int) -> list[str]:
        """What a stage received more than once."""
        places, _ = self._received[stage]
        counts = Counter(places.values())
        return [path for path, one in places.items() if counts[one] > 1]

    def _stage(self, stage: int, rank: int, kind: Kind, part: Part) -> Kind:
        failed: BaseException | None = None
        told = None
        if rank == self._scene.rank:
            try:
                told = StageReport("", self._forward(stage, kind, part))
                to_text(told)  # what cannot be told is an error of this stage
            except CommError:
                raise  # as in a step
            except BaseException as error:
                failed = error
                said = f"stage {stage}: {type(error).__name__}: {error}"
                told = StageReport(said, Kind({}, {}, {}), is_lacking(error), is_in_hook(error))
                before = self._scene.split.ranks[stage - 1]
                if stage and stage not in self._asked and before != rank:
                    self._send_object(told.failure, before)
        elif stage and self._scene.split.ranks[stage - 1] == self._scene.rank:
            self._serve(stage, rank)
        # Whatever happened on the rank of this stage, all come here: it is the only exchange that
        # every rank takes part in.
        told = self._lines.broadcast_object(told, rank)
        if failed is not None:
            raise failed
        if told.failure:
            repeated = RepeatedError(told.failure)
            repeated.lacks, repeated.in_hook = told.lacks, told.in_hook
            raise repeated
        # What was told, also on the rank that told it: one that went through text is alike
        # everywhere.
        found: Kind = told.kind
        return found

    def _forward(self, stage: int, kind: Kind, part: Part) -> Kind:
        scene = self._scene
        start = scene.streams.here()
        running = StageForward(scene, stage, kind, self)
        running.foreign.elsewhere = scene.elsewhere()
        written = _Parameters(scene)
        with KeptBytes(scene.model) if scene.split.is_auto else nullcontext() as kept:
            found = running.run(part)
        changed = self._state.changed()
        self._changed[stage] = self._state.tensors(changed)
        writes = writes_of(stage, self._state.written(changed), running.foreign)
        # Another stage of this rank begins where the microbatch does.
        self._state.restore()
        leaks = running.foreign.leaks
        self._taken[stage] = set() if leaks is None else leaks.taken
        written.require_unchanged()
        self._require_known_generators()
        self._received[stage] = running.places, running.received
        self._loss = found if found is not None else self._loss
        if kept is not None:
            scene.kept[stage] = max(kept.total, scene.kept.get(stage, 0))
        last = stage + 1 == len(scene.split.stages)
        drawn = words_between(start, scene.streams.here(), "the model")
        return Kind(
            # What an earlier stage has told stays: the last one describes no results.
            running.measured | kind.calls,
            kind.entries,
            kind.ends | {stage: drawn},
            drawn if last else (),
            spec_of(found) if last and found is not None else None,
            # Stages come in order, so that of several the last one is noted.
            tuple((dict(kind.uses) | dict.fromkeys(sorted(running.foreign.used), stage)).items()),
            writes=(*kind.writes, *writes),
        )

    def _require_known_generators(self) -> None:
        """Refuse draws by which other stages would have to move generators, and cannot."""
        moved = self._others.moved()
        if moved:
            raise PipelineError(
                f"a forward draws from {listed(moved)}: stages know how far each part of a model "
                "moves torch's default generators, and no others, so that their numbers would not "
                "be those of one device. Draw by torch without generator=."
            )

    def ask(self, stage: int, paths: list[str]) -> tuple[Entry, list[Tensor]]:
        """Ask the stage before for its values, and receive what they are."""
        before = self._scene.split.ranks[stage - 1]
        # From here on the stage before waits for nothing, so a failure must not be sent to it
        # again.
        self._asked.add(stage)
        if before == self._scene.rank:
            # The stage before is on this rank as well, as in the bend of a V.
            call, foreign = self._given[stage - 1]
            given = handed_over(call, tuple(paths), stage - 1, foreign)
            specs = tuple(spec_of(one) for one in given)
            return self._noted(stage, paths, specs), [local_of(one).detach() for one in given]
        self._send_object(paths, before)
        # A text is a refusal; specs come with the values behind them.
        answer = self._lines.recv_object(before)
        if isinstance(answer, str):
            raise RepeatedError(answer)
        entry = self._noted(stage, paths, answer)
        return entry, self._lines.recv(entry.specs, before)

    def _noted(self, stage: int, paths: list[str], specs: Any) -> Entry:
        entry = Entry(tuple(paths), tuple(specs))
        # In the kind that is told to all ranks at the end of this stage.
        running = self._scene.running
        assert running is not None
        running.kind.entries[stage] = entry
        return entry

    def give(self, stage: int, call: Mapping[str, Tensor], foreign: ForeignValues) -> list[Tensor]:
        """Keep what the next stage will ask for; its turn comes later."""
        self._given[stage] = (call, foreign)
        return []

    def _serve(self, stage: int, rank: int) -> None:
        """Answer the stage after one of this rank's."""
        # Two kinds of messages, by their type: paths that are asked for, or a text that says why
        # none are.
        wanted = self._lines.recv_object(rank)
        if isinstance(wanted, str):
            return  # it failed before it asked; all ranks hear of it next
        call, foreign = self._given[stage - 1]
        try:
            tensors = handed_over(call, tuple(wanted), stage - 1, foreign)
            specs = tuple(spec_of(one) for one in tensors)
            locals_ = [local_of(one).detach() for one in tensors]
            self._require_here(locals_, wanted)
        # Any: the other stage waits for an answer, and what fails here would be heard of by nobody.
        except BaseException as error:
            self._send_object(str(error), rank)
            return
        self._send_object(specs, rank)
        self._handles += self._lines.send(locals_, rank)

    def _require_here(self, tensors: list[Tensor], paths: list[str]) -> None:
        """Refuse what lies on another device than stages send from."""
        for one, path in zip(tensors, paths, strict=True):
            if one.device.type != self._lines.device:
                raise PipelineError(
                    f"{path} of the (args, kwargs) of the next block is on {one.device}: stages "
                    f"exchange tensors on {self._lines.device}. Let blocks return it there."
                )

    def _send_object(self, value: Any, target: int) -> None:
        self._handles += self._lines.send_object(value, target)


class _Parameters:
    """The parameters of this rank as they are before the trial run of a stage."""

    def __init__(self, scene: RankStages) -> None:
        # The leaves themselves: of what inference mode makes of them torch counts no writes.
        pairs = [
            (name, local_leaf(one) if isinstance(one, DTensor) else one)
            for name, one in scene.model.named_parameters()
        ]
        self._before = [(name, leaf, leaf._version) for name, leaf in pairs]
        self._held = [h for h in (scene.held, scene.behind) if isinstance(h, HeldParameters)]
        schedule = zero_schedule_of(scene.model)
        self._units = schedule.units if schedule is not None else []
        for unit in self._units:
            unit.taken.clear()

    def require_unchanged(self) -> None:
        """Refuse forwards that write to parameters, on every rank."""
        written = {name for name, leaf, version in self._before if leaf._version != version}
        written = written.union(*(one.written() for one in self._held))
        written = written.union(*(one.taken for one in self._units))
        if written:
            raise PipelineError(
                f"a forward writes to parameters, {listed(sorted(written))}: microbatches of a "
                "pipeline go forward before earlier ones have gone back, so each would compute "
                "with what others wrote. Write between steps: this trial run has done so once."
            )


def _names(places: Iterable[Place]) -> list[str]:
    return [".".join(one[:2]).lstrip(".") for one in places]
