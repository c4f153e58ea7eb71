"""Computes a step of `forward_backward` for a model in stages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import CommError, compare_anew
from vescale_comm.agreement import gather_numbers

from vescale_parallel._common.agreement import everyone
from vescale_parallel._common.messages import listed
from vescale_parallel._pipeline.finish.outputs import broadcast_output, transfer_problem
from vescale_parallel._pipeline.finish.refused_hooks import AutogradHooks
from vescale_parallel._pipeline.finish.same_calls import (
    HooksChanged,
    SameCalls,
    drawn_from,
    plain_of,
)
from vescale_parallel._pipeline.finish.step_end import (
    EarlierGradients,
    NewGradients,
    finish_step,
    is_whole,
    note_of,
    require_success,
)
from vescale_parallel._pipeline.microbatches import divided, drop_kept
from vescale_parallel._pipeline.plan.model_walk import ModelWalk, TrainedParameters, Walker
from vescale_parallel._pipeline.run.measurements import Stopwatch, choose_schedule
from vescale_parallel._pipeline.run.messages import Lines
from vescale_parallel._pipeline.run.rank_stages import RankStages
from vescale_parallel._pipeline.run.runner import (
    Microbatch,
    Runner,
    first_microbatches,
    forwards_only,
    writes_of,
)
from vescale_parallel._pipeline.run.stage_parameters import forget_held, is_plain
from vescale_parallel._pipeline.run.state_writes import require_specs, tell_buffers
from vescale_parallel._pipeline.run.trial_run import TrialRun
from vescale_parallel._pipeline.trace.hook_results import hides_hooks
from vescale_parallel._pipeline.trace.loss_dependence import agreed_kinds, dependence_report
from vescale_parallel._pipeline.trace.microbatch_kinds import Kind, is_in_hook, is_lacking
from vescale_parallel._pipeline.trace.route import Routes
from vescale_parallel._pipeline.trace.streams import Place, after
from vescale_parallel._pipeline.units import look_at_hooks, watch_within
from vescale_parallel._schedules.actions import Schedule
from vescale_parallel._step.parts import Part
from vescale_parallel._zero.schedule import zero_schedule_of

_MEASURED: Final = 2
"""Which training step is measured for `schedule="auto"`."""

_KINDS: Final = 1024
"""Kinds of microbatches that are remembered, before all are looked at anew."""

_HOOKS_STAY: Final = (
    "Hooks within blocks of this model are called on the stages of these blocks only; what they "
    "collect for code outside of the blocks is missing on others."
)


class StagedStep:
    """Runs the stages of a model by its schedule.

    Args:
        scene: this rank's part of the pipeline.
        lines: its connections.
        mesh: all ranks.
        dim: the dim of rows.
    """

    def __init__(self, scene: RankStages, lines: Lines, mesh: DeviceMesh, dim: int) -> None:
        self._scene, self._lines, self._mesh, self._dim = scene, lines, mesh, dim
        self._same = SameCalls(mesh, scene.stepped)
        self._group = everyone(mesh)
        self._walker = Walker(scene.model, scene.split.owners)
        # What was found in a table of parameters by name.
        self._shared: tuple[dict[str, nn.Parameter], list[nn.Parameter]] = {}, []
        self._schedule = scene.split.schedule
        # Training steps until the schedule is chosen: the first one warms up.
        self._unmeasured = _MEASURED if scene.split.is_auto else 0
        # By shapes and modes. Every rank has the same keys, as all of them are compared before use.
        self._kinds: dict[Any, Kind] = {}
        # Of the same keys: what this rank alone knows of them.
        self._routes: dict[Any, Routes] = {}
        # Kinds of which a whole step has drawn nothing here, neither forwards nor backwards. By
        # `id`, and held: a kind that is learned anew must not be taken for one that is gone.
        self._still: dict[int, Kind] = {}
        # Whether a first forward may begin before all ranks are known to call alike. Not one that
        # exchanges anything beside its messages: with ranks that call otherwise it would wait.
        self._may_begin = is_plain(scene.mesh) and zero_schedule_of(scene.model) is None
        # The forward hooks of modules at the end of the latest call that went well.
        self._hooks: list[int] | None = None

    @property
    def microbatches(self) -> int:
        """How many a batch is divided into, if it has the rows."""
        return self._scene.split.schedule.microbatches

    def forward_backward(self, part: Part) -> Tensor:
        """Return the loss of the whole batch, on every rank; gradients are left complete.

        Dropout masks are those of one device that accumulates over the same microbatches, bit for
        bit, whatever the schedule. Under `torch.no_grad()` only the forward runs. Collective.

        Raises:
            PipelineError: on every rank: the model cannot run in stages as it is, or a rank failed:
                its own error there, elsewhere one that names it.
        """
        walked, count = self._walker.walk(), self.microbatches
        microbatches, agreed = self._prepared(part, count, walked, may_begin=True)
        try:
            total = self._stepped(microbatches, walked, agreed)
        except HooksChanged:
            # A first forward has run here, by what was known of such a batch. Nothing was sent.
            total = self._stepped(self._learned_anew(part, count, walked), walked)
        self._hooks = self._walker.hooks()
        return total

    def _stepped(
        self,
        microbatches: list[Microbatch],
        walked: ModelWalk,
        agreed: Callable[[], None] | None = None,
    ) -> Tensor:
        """The loss of microbatches, with their gradients. Collective."""
        scene = self._scene
        trains = torch.is_grad_enabled()
        # Evaluations have no backwards to wait for, but go through the same stages in the same
        # order.
        schedule = first_microbatches(self._schedule, len(microbatches))
        schedule = schedule if trains else forwards_only(schedule)
        watch = Stopwatch(self._mesh.device_type) if trains and self._unmeasured == 1 else None
        # In the order of the model, which is that of the numbers in the message.
        trained = walked.trained() if trains else TrainedParameters([], [])
        earlier = EarlierGradients(self._shared_of(walked.named) if trains else [])
        # What units of `zero` keep is told by the parameter itself alone.
        is_kept = zero_schedule_of(scene.model) is not None
        new = NewGradients(
            [p for p in trained.parameters if p.grad is None] if is_kept else trained.without()
        )
        try:
            loss, notes = self._run(schedule, microbatches, watch, trained, agreed)
            kind, whole = microbatches[-1].kind, _have_whole_losses(microbatches)
            total = finish_step(loss, notes, kind, scene, self._lines, trained, whole=whole)
        except BaseException:
            new.drop()
            earlier.restore()
            raise
        earlier.add()
        if trains:
            self._unmeasured = max(self._unmeasured - 1, 0)
        if watch is not None:
            memory = scene.split.memory
            self._schedule = choose_schedule(
                self._schedule, watch, scene, self._lines, memory, self._mesh
            )
        return total

    def _shared_of(self, named: dict[str, nn.Parameter]) -> list[nn.Parameter]:
        """The parameters that every stage holds."""
        # Of the same table, which is made anew where a model has changed.
        if self._shared[0] is not named:
            owners = self._scene.split.owners
            self._shared = named, [one for name, one in named.items() if owners[name] is None]
        return self._shared[1]

    def evaluate(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what the model returns for a whole batch, on every rank. Collective.

        Args:
            forward: of the model, without its hooks: those of this call have run.
            args: of the forward.
            kwargs: of the forward.

        Raises:
            PipelineError: on every rank: as `forward_backward`, or the output has more in it than
                tensors, numbers and texts.
        """
        outputs: list[Any] = []

        def keep(output: Any) -> Tensor:
            running = self._scene.running
            output = output if running is None else running.known(output)
            problem = transfer_problem(output)
            if problem is not None:
                raise problem
            outputs.append(output)
            return torch.zeros((), device=self._lines.device)

        scene = self._scene
        scene.call = forward
        try:
            walked = self._walker.walk()
            microbatches, _ = self._prepared(Part(args, kwargs, keep), 1, walked, "output")
            # A trial run calls the loss as well: its output holds placeholders.
            outputs.clear()  # of a trial run
            self._run(forwards_only(first_microbatches(self._schedule, 1)), microbatches)
            self._hooks = self._walker.hooks()
        finally:
            # Otherwise the next step would run without the hooks of the model.
            scene.call = None
        return broadcast_output(outputs[-1] if outputs else None, scene, self._lines)

    def _prepared(
        self,
        part: Part,
        count: int,
        walked: ModelWalk,
        what: str = "loss",
        *,
        may_begin: bool = False,
    ) -> tuple[list[Microbatch], Callable[[], None] | None]:
        """The microbatches of a call that all ranks make alike, after trial runs. Collective.

        Beside them what waits for the other ranks to tell of their calls, and raises: None where
        they have. It is asked for before anything is sent.
        """
        scene = self._scene
        look_at_hooks(scene)
        scene.is_compiled = walked.is_compiled
        start = scene.streams.here()
        modes = (*walked.modes(self._mesh.device_type), what)
        hooked = AutogradHooks.of(walked, scene)
        # Of a kind that was tried without them.
        has_new = bool(self._kinds) and self._hooks != self._walker.hooks()
        setting = {
            "parameters with hooks": str(hooked.parameters),
            "first blocks of stages with backward hooks": str(hooked.blocks),
            **self._drawn_from(start),
        }
        if torch.is_grad_enabled():
            # Of a parameter that only some ranks have set to None others would have a sum.
            setting["parameters with gradients"] = walked.gradients()
        if walked.late:
            setting["parameters that came after parallelize"] = listed(walked.late)
        agreed = self._same.start(part, modes, setting, has_new=has_new)
        # While the others tell. What is wrong with this call is said once they are heard.
        refused = any(hooked) or bool(walked.late)
        begins = may_begin and self._may_begin and not refused and not has_new
        known = self._known(part, count, modes) if begins else None
        if known is not None:
            return self._placed(*known), agreed
        try:
            agreed()
        except HooksChanged:
            self._forget_kinds()
        walked.refuse_late()
        hooked.refuse()
        return self._learned(part, count, modes, start), None

    def _learned_anew(self, part: Part, count: int, walked: ModelWalk) -> list[Microbatch]:
        """The microbatches of a step, after a trial run with the hooks of now. Collective."""
        self._forget_kinds()
        modes = (*walked.modes(self._mesh.device_type), "loss")
        return self._learned(part, count, modes, self._scene.streams.here())

    def _learned(self, part: Part, count: int, modes: object, start: Place) -> list[Microbatch]:
        """The microbatches of a call, after trial runs. Collective.

        All ranks decide alike: what they decide by has been compared.
        """
        parts = divided(part, count, self._dim)
        # Shapes of parts and not of the batch: the last microbatch may be smaller than the others.
        keys = _keys_of(parts, modes)
        if not self._kinds.keys() >= set({id(key): key for key in keys}.values()):
            self._learn(parts, keys, start)
        return self._placed(parts, keys)

    def _learn(self, parts: list[tuple[Part, float]], keys: list[Any], start: Place) -> None:
        """Try microbatches of new kinds. Collective."""
        # A rank that failed goes on to the vote: the others are on their way there.
        failure = self._try_kinds(parts, keys)
        if self._shall_collect(failure):
            failure = self._try_kinds(parts, keys)
        elif self._may_hide(failure):
            failure = self._try_with_hooks(parts, keys)
        new = [key for key in dict.fromkeys(keys) if not self._is_agreed(key)]
        note = b"" if failure is not None else dependence_report(self._kinds[key] for key in new)
        told = self._require_success(failure, start, note)
        kinds = agreed_kinds([self._kinds[key] for key in new], told, self._lines.ranks)
        self._kinds.update(zip(new, kinds, strict=True))
        # Only now it is known whether such a batch draws anything.
        self._same.require(self._drawn_from(start))

    def _is_agreed(self, key: Any) -> bool:
        return key in self._kinds and self._kinds[key].is_agreed

    def _known(
        self, part: Part, count: int, modes: object
    ) -> tuple[list[tuple[Part, float]], list[Any]] | None:
        """Microbatches and their kinds, if a forward of them may begin before all ranks agree."""
        try:
            parts = divided(part, count, self._dim)
            keys = _keys_of(parts, modes)
            # By `id`, see `_placed`.
            different = {id(key): key for key in keys}.values()
            return (parts, keys) if self._kinds.keys() >= set(different) else None
        except Exception:
            return None

    def _run(
        self,
        schedule: Schedule,
        microbatches: list[Microbatch],
        watch: Stopwatch | None = None,
        trained: TrainedParameters | None = None,
        agreed: Callable[[], None] | None = None,
    ) -> tuple[Tensor | None, dict[int, bytes]]:
        """Run a schedule; returns this rank's part of the loss, and what all tell. Collective."""
        start = microbatches[0].start
        # A new one for each step: nothing of a failed step may be found by the next.
        kinds = {id(one.kind): one.kind for one in microbatches}
        is_still = kinds.keys() <= self._still.keys()
        runner = Runner(self._scene, self._lines, schedule, microbatches, watch, is_still=is_still)
        try:
            failure = runner.run(agreed)
        except BaseException:  # of others: what this rank could not do is returned
            self._scene.streams.seek(start)
            raise
        finally:
            forget_held(self._scene.held)
            forget_held(self._scene.behind)
        # Where one device stands after the batch, whichever of its blocks this rank has run.
        runner.has_moved |= self._scene.streams.seek(microbatches[-1].end)
        if not runner.has_moved and trained is not None:
            self._still |= kinds
        note, writes = b"", writes_of(microbatches)
        if failure is None:
            try:
                require_specs(self._scene, writes)
                if trained is not None:
                    note = note_of(runner.loss, trained, whole=_have_whole_losses(microbatches))
            except BaseException as error:
                failure = error
        notes = self._require_success(failure, start, note)
        tell_buffers(self._scene, self._lines, writes)
        return runner.loss, notes

    def _require_success(
        self, failure: BaseException | None, start: Place, note: bytes = b""
    ) -> dict[int, bytes]:
        """Raise on every rank where one has failed. Collective."""
        split = self._scene.split
        own = [str(i) for i, rank in enumerate(split.ranks) if rank == self._scene.rank]
        try:
            return require_success(failure, f"stage {', '.join(own)}", note, self._group)
        except BaseException:
            # What was learned may be what was wrong: the next call looks again.
            self._forget_kinds()
            drop_kept(self._scene.model)
            self._scene.streams.seek(start)
            # All ranks come here. Those of the stage that failed have not executed what the others
            # of it have. Where others run another model, they do not hear of this.
            if self._group is None:
                compare_anew()
            raise

    def _drawn_from(self, start: Place) -> dict[str, str]:
        """Where the streams stand, if they are drawn from: each stage draws from its own."""
        # Models without dropout may be seeded by rank, as many scripts do; that is no fault.
        if not any(any(kind.total) for kind in self._kinds.values()):
            return {}
        return drawn_from(start)

    def _try_kinds(self, parts: list[tuple[Part, float]], keys: list[Any]) -> BaseException | None:
        # All at once and by number, so that every rank forgets at the same call.
        if len(self._kinds) >= _KINDS:
            self._forget_kinds()
        problem: BaseException | None = None
        try:
            for (one, _), key in zip(parts, keys, strict=True):
                if key not in self._kinds:
                    trial = TrialRun(self._scene, self._lines)
                    # With a graph also for an evaluation: what needs gradients is known for both.
                    # Not of tensors of inference mode, which no graph can keep.
                    with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):
                        self._kinds[key] = trial.run(one)
                    # After the last one: ranks that know of none go on to the next trial run.
                    problem = problem or trial.problem
                    forget_held(self._scene.held)
        except CommError:
            raise  # who does not answer now would not later: nothing can be told to others
        except BaseException as error:
            return error
        return problem

    def _forget_kinds(self) -> None:
        self._kinds.clear()
        self._routes.clear()
        self._still.clear()
        self._scene.collects = False

    def _shall_collect(self, failure: BaseException | None) -> bool:
        """Whether hooks within blocks are called on all stages from now on. Collective."""
        scene = self._scene
        may = is_lacking(failure) and not scene.collects and watch_within(scene)
        # All or none: what is tried again is a collective of the ranks of each stage.
        scene.collects = scene.collects or self._all(may)
        return may and scene.collects

    def _may_hide(self, failure: BaseException | None) -> bool:
        """Whether hooks of other stages may collect what nobody has missed. Collective."""
        scene = self._scene
        may = failure is None and not scene.collects
        may = may and hides_hooks(scene.model, scene.split.stages)
        return self._all(may)

    def _all(self, so: bool) -> bool:
        """Whether it is so on all ranks. Collective."""
        return all(one for (one,) in gather_numbers([int(so)], self._group))

    def _try_with_hooks(
        self, parts: list[tuple[Part, float]], keys: list[Any]
    ) -> BaseException | None:
        """Call hooks on all stages, and go on so if the model uses what they collect. Collective.

        A hook that does more with results than to collect them, as to print, is none that others
        need: it is called on the stage that has its block.
        """
        scene = self._scene
        known, self._kinds = self._kinds, {}
        watch_within(scene)
        scene.collects = True
        failure = self._try_kinds(parts, keys)
        in_hook = is_in_hook(failure)
        uses = any(kind.uses for kind in self._kinds.values())
        own = [int(in_hook), int(failure is not None and not in_hook), int(uses)]
        told = gather_numbers(own, self._group)
        hooks, others, used = map(any, zip(*told, strict=True))
        if not others and (hooks or not used):
            scene.collects, self._kinds = False, known
            if hooks and in_hook:
                warnings.warn(f"{failure}. {_HOOKS_STAY}", stacklevel=2)
            return None
        self._kinds = known | self._kinds
        return failure

    def _placed(self, parts: list[tuple[Part, float]], keys: list[Any]) -> list[Microbatch]:
        """The microbatches, and where in the streams each begins and ends."""
        place = self._scene.streams.here()
        made = []
        # By `id`: to hash the modes of thousands of modules takes longer than all else here, and
        # most microbatches have one key.
        known: dict[int, tuple[Kind, Routes]] = {}
        for (one, weight), key in zip(parts, keys, strict=True):
            if id(key) not in known:
                known[id(key)] = self._kinds[key], self._routes.setdefault(key, {})
            kind, routes = known[id(key)]
            end = after(place, kind.total)
            made.append(Microbatch(one, weight, kind, place, end, routes))
            place = end
        return made


def _have_whole_losses(microbatches: Sequence[Microbatch]) -> bool:
    """Whether no loss is a sum over the ranks of the last stage; the same answer on all ranks."""
    specs = [one.kind.loss for one in microbatches]
    return all([is_whole(spec.placements) for spec in specs if spec is not None])


def _keys_of(parts: list[tuple[Part, float]], modes: object) -> list[Any]:
    """For each microbatch what its kind is known by."""
    # Their shapes differ by their rows alone, and rows by their shares: most are looked at once.
    by_share: dict[float, Any] = {}
    for one, share in parts:
        if share not in by_share:
            by_share[share] = (*_shapes_of(one), modes)
    return [by_share[share] for _, share in parts]


def _shapes_of(part: Part) -> tuple[Any, Any]:
    """What decides what stages exchange: tensors but for their values, and plain arguments."""
    shapes = tuple(
        (path, tuple(one.shape), one.dtype, one.requires_grad)
        for path, one in part.tensors().items()
    )
    # Numbers that are scales change from step to step, and choose no branch.
    plain = tuple((k, v) for k, v in plain_of(part).items() if not isinstance(v, float))
    return shapes, plain
