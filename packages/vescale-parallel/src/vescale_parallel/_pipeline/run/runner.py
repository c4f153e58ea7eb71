"""The actions of a schedule on one rank, and what happens where one of them fails.

A rank that fails goes on in the order of its row: it sends what others wait for, without values,
and receives what they send. So all of them come to the end of the step, where every rank hears of
it and raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vescale_comm import CommError

from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.run.boundary import check_specs, handed_over
from vescale_parallel._pipeline.run.halves import Halves
from vescale_parallel._pipeline.run.measurements import Stopwatch
from vescale_parallel._pipeline.run.messages import Inbox, Lines, Message
from vescale_parallel._pipeline.run.rank_stages import RankStages
from vescale_parallel._pipeline.run.stage import StageForward
from vescale_parallel._pipeline.run.state_writes import OwnState
from vescale_parallel._pipeline.trace.foreign_values import ForeignValues
from vescale_parallel._pipeline.trace.loss_dependence import ReturnedGradients
from vescale_parallel._pipeline.trace.microbatch_kinds import Entry, Kind
from vescale_parallel._pipeline.trace.module_state import State, Write
from vescale_parallel._pipeline.trace.route import Routes
from vescale_parallel._pipeline.trace.streams import Place, drawn_otherwise
from vescale_parallel._pipeline.trace.tensor_specs import Blanks, TensorSpec, local_of
from vescale_parallel._schedules.actions import Action, Schedule
from vescale_parallel._step.parts import Part
from vescale_parallel._zero.schedule import zero_schedule_of


class Microbatch(NamedTuple):
    """A microbatch of a step.

    Attributes:
        part: its arguments.
        weight: its share of the rows: what its loss counts in that of the batch.
        kind: what is known of its kind.
        start: where in the random streams it begins.
        end: where it ends.
        routes: which units forwards of that kind call, as far as that is known.
    """

    part: Part
    weight: float
    kind: Kind
    start: Place
    end: Place
    routes: Routes | None = None


@dataclass
class _ForwardRecord:
    """What a forward leaves for its backward.

    Attributes:
        received: leaves, whose gradients go to the stage before.
        sent: tensors, whose gradients come from the stage after.
        loss: on the last stage, its part of the loss of the batch: the local tensor.
    """

    received: list[Tensor]
    sent: list[Tensor]
    loss: Tensor | None


class _BackwardStart(NamedTuple):
    """What a backward of a stage starts with, and what it owes to the stage before.

    Attributes:
        outputs: local tensors with a history.
        gradients: of these.
        leaves: what was received and requires a gradient.
        received: all of it.
    """

    outputs: list[Tensor]
    gradients: list[Tensor]
    leaves: list[Tensor]
    received: list[Tensor]


class Runner:
    """One step on one rank.

    Attributes:
        loss: the sum of the losses of this rank's microbatches, on the last stage.
        has_moved: whether somebody has drawn, forwards or backwards, or what passes for it.

    Args:
        scene: this rank's part.
        lines: its connections.
        schedule: who does what.
        microbatches: of the step.
        watch: what measures actions.
        is_still: whether the step is one of those that draw nothing, also not in backward.
    """

    def __init__(
        self,
        scene: RankStages,
        lines: Lines,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        watch: Stopwatch | None = None,
        *,
        is_still: bool = False,
    ) -> None:
        self._scene, self._lines, self._schedule = scene, lines, schedule
        self._microbatches, self._watch = microbatches, watch
        # By then nobody draws, so it is enough to ask at the end: to read where a generator stands
        # takes as long as to call a dozen modules.
        self._is_still = is_still
        self.has_moved = False
        self._inbox = Inbox(lines, schedule, self._specs)
        self._kept: dict[tuple[int, int], _ForwardRecord] = {}
        # Backwards of which gradients of weights are still to come.
        self._halves: dict[tuple[int, int], Halves] = {}
        self._returned = ReturnedGradients()
        # Messages on their way, with their memory.
        self._sent: dict[Message, list[Any]] = {}
        self._given: set[Message] = set()
        # What a first forward gives before it is known that all ranks call alike; None: they do.
        self._held_back: list[tuple[Message, list[Tensor]]] | None = []
        # Of this step: between steps nothing is held.
        self._blanks = Blanks(lines.device)
        # The latest forward of each stage and kind, which the next one may be again.
        self._forwards: dict[tuple[int, int], StageForward] = {}
        self._now = 0
        self._zero = zero_schedule_of(scene.model)
        self.loss: Tensor | None = None
        self._writes = writes_of(microbatches)
        # What the first forward writes, where it may have to be taken back.
        self._before: State | None = None
        self._state = OwnState(scene, self._writes) if self._writes else None

    def run(self, agreed: Callable[[], None] | None = None) -> BaseException | None:
        """Do all actions of this rank; returns what one of them raised.

        Args:
            agreed: called before anything is sent or received: raises if ranks call otherwise.
        """
        # Around all of them, for modules need no change between two of them.
        with ExitStack() as around:
            if self._state is not None:
                around.callback(self._state.end)
            return self._run(around, agreed)

    def _run(self, around: ExitStack, agreed: Callable[[], None] | None) -> BaseException | None:
        row = self._schedule.ranks[self._scene.rank]
        failure: BaseException | None = None
        # The backward behind which no other comes on this rank: only there are gradients complete.
        last = max((at for at, action in enumerate(row) if action.kind != "F"), default=-1)
        # A forward that needs nothing of others runs while they tell how they call.
        begins = agreed is not None and bool(row) and self._inbox.passes[row[0]][0] is None
        if not begins:
            self._begin(agreed)
        elif self._writes:
            places = {one.place for one in self._writes if one.stage == row[0].stage}
            self._before = State(self._scene.model, places)
        for at, action in enumerate(row):
            try:
                if not at:
                    around.enter_context(self._scene.held)
                self._act(action, syncs=at == last)
            except CommError:
                raise  # who does not answer now would not later: nothing can be told to others
            # Also where it was interrupted: the others go on, and wait for what this rank sends.
            except BaseException as error:
                failure = error
            if begins and not at:
                self._begin(agreed)
            if failure is not None:
                # From the failed action on: what it was about to give has not been sent either.
                # `_given` holds what has. In the order of the row: others rely on it that who sends
                # has taken what comes before, and would wait where their sends are not taken.
                for rest in row[at:]:
                    self._skip(rest)
                break
        if self._is_still and failure is None:
            failure = self._moved()
        if failure is None:
            failure = self._returned.problem(one.kind for one in self._microbatches)
        # Senders may wait for receivers, so all that others send to this rank is taken, also after
        # a failure.
        self._inbox.drain()
        # Graphs of a failed step hold activations, and stages of a next one would find them under
        # the same keys.
        self._kept.clear()
        self._forwards.clear()
        self._halves.clear()
        # The memory of what is on its way must live until it is sent; nothing else holds it.
        for handles in self._sent.values():
            for one in handles:
                one.wait()
        return failure

    def _begin(self, agreed: Callable[[], None] | None) -> None:
        """From here on messages are received, and what was held back for other ranks is sent."""
        try:
            if agreed is not None:
                agreed()
        except BaseException:
            self._kept.clear()
            self._forwards.clear()
            if self._before is not None:
                assert self._state is not None
                self._state.drop()
                self._before.restore()
            raise
        self._before = None
        held, self._held_back = self._held_back, None
        for message, tensors in held or ():
            self._send(message, tensors)
        # Behind what others wait for.
        self._inbox.begin()

    def _moved(self) -> PipelineError | None:
        """What is wrong where a step has drawn that is one of those that draw nothing."""
        scene = self._scene
        if not scene.streams.seek(self._microbatches[0].start):
            return None
        own = [at for at, rank in enumerate(scene.split.ranks) if rank == scene.rank]
        return drawn_otherwise(scene.split.stages, own)

    def _act(self, action: Action, *, syncs: bool) -> None:
        if self._watch is None:
            self._act_by_kind(action, syncs=syncs)
            return
        with self._watch.action(action):
            self._act_by_kind(action, syncs=syncs)

    def _act_by_kind(self, action: Action, *, syncs: bool) -> None:
        if action.kind == "F":
            self._forward(action)
            return
        zero = self._zero
        if zero is None:
            self._backward(action)
        elif syncs:
            self._backward(action)
            # What the last backward has left: one without parameters of units reduces none.
            zero.flush()
        else:
            # Gradients are reduced once, behind the last of them.
            with zero.no_sync():
                self._backward(action)

    def _forward(self, action: Action) -> None:
        self._now = action.microbatch
        stage, here = action.stage, self._microbatches[action.microbatch]
        if not self._is_still:
            # Microbatches come in the schedule's order, but draw what one device draws in theirs.
            self.has_moved |= self._scene.streams.seek(here.start) or any(here.kind.total)
        self._blanks.begin()
        running = self._begun(stage, here)
        with nullcontext() if self._state is None else self._state.of(stage):
            found = running.run(here.part, here.start)
        loss = None
        if found is not None:
            # By rows: the last microbatch may have fewer, and the batch's loss is the mean over
            # rows. Not the loss itself: its history would keep the graphs of all microbatches
            # alive.
            value = found.detach() * here.weight
            self.loss = value if self.loss is None else self.loss + value
            # Backward starts below the wrapper, so that gradients of the other half are asked for
            # by plain nodes. It starts with the weight, which is the gradient of the product.
            loss = local_of(found)
        received, sent = running.let_go()
        if torch.is_grad_enabled():
            self._kept[stage, action.microbatch] = _ForwardRecord(received, sent, loss)

    def _begun(self, stage: int, here: Microbatch) -> StageForward:
        """A forward of a stage for a microbatch."""
        key = stage, id(here.kind)
        running = self._forwards.get(key)
        if running is None or not running.again():
            running = StageForward(self._scene, stage, here.kind, self, self._blanks, here.routes)
            running.is_still = self._is_still
            self._forwards[key] = running
        return running

    def _backward(self, action: Action) -> None:
        self._now = action.microbatch
        kind, stage, microbatch = action
        # What is computed again in backward looks for its parameters in the modules, which hold
        # those of stages around all actions.
        with self._scene.behind:
            if kind == "W":
                halves = self._halves.pop((stage, microbatch), None)
                if halves is not None:
                    halves.weights()
                return
            found = self._returning(action)
            if kind == "B" or stage in self._scene.recomputing:
                # What is computed again is so in each run of the engine, so it is run once.
                if found.outputs:
                    torch.autograd.backward(found.outputs, found.gradients)
                back = [one.grad for one in found.leaves]
            else:
                halves = Halves(found.outputs, found.gradients, found.leaves)
                self._halves[stage, microbatch] = halves
                back = halves.inputs()
        _, gives = self._inbox.passes[action]
        if gives is not None:
            here = self._microbatches[microbatch].kind
            self._send(gives, self._returned.gradients(stage, here, found.received, back))

    def _returning(self, action: Action) -> _BackwardStart:
        """What a backward starts with: gradients from the stage after, or the loss."""
        stage, microbatch = action.stage, action.microbatch
        # Popped, so that activations go as soon as the backward has used them: that is what 1F1B is
        # for.
        kept = self._kept.pop((stage, microbatch))
        needs, _ = self._inbox.passes[action]
        leaves = [one for one in kept.received if one.requires_grad]
        if needs is None:
            assert kept.loss is not None
            weight = torch.full_like(kept.loss, self._microbatches[microbatch].weight)
            # One without a history is torch's error, as on one device.
            return _BackwardStart([kept.loss], [weight], leaves, kept.received)
        # Gradients come only for what has one: both sides take that from the same entry.
        found = _BackwardStart([], [], leaves, kept.received)
        backs = self._entry(stage + 1).backs
        wanted = [one for one, goes in zip(kept.sent, backs, strict=True) if goes]
        for one, gradient in zip(wanted, self._take(needs), strict=True):
            if one.requires_grad:
                found.outputs.append(one)
                found.gradients.append(gradient)
        return found

    def ask(self, stage: int, paths: list[str]) -> tuple[Entry, list[Tensor]]:
        """Receive what the stage before has sent for this microbatch."""
        return self._entry(stage), self._take(Message("forward", stage, self._now))

    def give(self, stage: int, call: Mapping[str, Tensor], foreign: ForeignValues) -> list[Tensor]:
        """Send to the stage after; returns what gradients will come for."""
        entry = self._entry(stage + 1)
        tensors = handed_over(call, entry.paths, stage, foreign)
        locals_ = check_specs(tensors, entry.specs, stage)
        # Copies on one rank: a leaf of the next stage must not share the history of this one.
        message = Message("forward", stage + 1, self._now)
        self._send(message, [one.detach() for one in locals_])
        return locals_

    def _entry(self, stage: int) -> Entry:
        return self._microbatches[self._now].kind.entries[stage]

    def _specs(self, message: Message) -> Sequence[TensorSpec]:
        kind = self._microbatches[message.microbatch].kind
        if message.way == "forward":
            return kind.entries[message.stage].specs
        return kind.entries[message.stage + 1].wanting

    def _send(self, message: Message, tensors: list[Tensor]) -> None:
        # Noted before it is sent: a failure in between must not send it a second time.
        self._given.add(message)
        target = self._schedule.stage_ranks[message.stage]
        if target == self._scene.rank:
            self._inbox.put(message, tensors)
        elif self._held_back is not None:
            self._held_back.append((message, tensors))
        else:
            self._sent[message] = self._lines.send(tensors, target)

    def _take(self, message: Message) -> list[Tensor]:
        if self._watch is None:
            found = self._inbox.take(message)
        else:
            with self._watch.pause():
                found = self._inbox.take(message)
        # Who has sent this has taken what came before in its row: that memory can go.
        for sent in list(self._sent):
            # No test of handles: whether a send has ended differs from rank to rank, and polling
            # would cost at each action.
            taker, at = self._inbox.takers[sent]
            if at <= self._inbox.seen.get(taker, -1):
                for one in self._sent.pop(sent):
                    one.wait()
        return found

    def _skip(self, action: Action) -> None:
        """Take what an action would have taken, and send zeros for what it would have sent."""
        needs, gives = self._inbox.passes[action]
        if needs is not None:
            self._inbox.skip(needs)
        if gives is None or gives in self._given:
            return
        # Nobody else waits for it.
        if self._schedule.stage_ranks[gives.stage] == self._scene.rank:
            return
        # Zeros, of the right shapes: the receiver computes with them until it hears of the failure
        # at the end.
        empty = [
            torch.zeros(one.shape, dtype=one.dtype, device=self._lines.device)
            for one in self._specs(gives)
        ]
        self._send(gives, empty)


def writes_of(microbatches: Sequence[Microbatch]) -> list[Write]:
    """State of modules that a step writes, in the order of the stages."""
    kinds = {id(one.kind): one.kind for one in microbatches}.values()
    # No set, whose order may differ from rank to rank.
    found = dict.fromkeys(one for kind in kinds for one in kind.writes)
    return sorted(found, key=lambda one: one.stage)


def forwards_only(schedule: Schedule) -> Schedule:
    """The same schedule without its backwards."""
    rows = tuple(tuple(a for a in row if a.kind == "F") for row in schedule.ranks)
    return schedule._replace(ranks=rows)


def first_microbatches(schedule: Schedule, count: int) -> Schedule:
    """The same schedule of its first microbatches alone, for a batch that makes fewer."""
    if count == schedule.microbatches:
        return schedule
    rows = tuple(tuple(a for a in row if a.microbatch < count) for row in schedule.ranks)
    return schedule._replace(ranks=rows, microbatches=count)
