"""Measures what stages take and keep, and chooses the schedule on all ranks by it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm.agreement import broadcast_text

from vescale_parallel._common.agreement import everyone
from vescale_parallel._common.mesh import mesh_ranks
from vescale_parallel._errors import PlanError
from vescale_parallel._pipeline.plan.schedule_choice import best_in_place
from vescale_parallel._pipeline.run.messages import Lines
from vescale_parallel._pipeline.run.rank_stages import RankStages
from vescale_parallel._pipeline.trace.tensor_specs import local_of
from vescale_parallel._schedules.actions import Action, Schedule
from vescale_parallel._schedules.choice import make_schedule
from vescale_parallel._schedules.timeline import StageTimes


class Stopwatch:
    """How long the actions of this rank take, without what they wait for from other ranks.

    Args:
        device_type: of the mesh: queued work of a device is waited for.

    Attributes:
        took: by stage and kind, the seconds of each of its actions.
        began, ended: the clock at the first and behind the last action.
    """

    def __init__(self, device_type: str) -> None:
        self._on_device = device_type == "cuda"
        self.took: dict[tuple[int, str], list[float]] = {}
        self.began = self.ended = 0.0
        self._paused = 0.0

    @property
    def busy(self) -> float:
        """How long this rank has computed."""
        return sum(map(sum, self.took.values()))

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Time one action."""
        self._paused = 0.0
        start = self._now()
        yield
        self.began, self.ended = self.began or start, self._now()
        took = self.ended - start - self._paused
        self.took.setdefault((action.stage, action.kind), []).append(took)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out what is done meanwhile."""
        start = self._now()
        yield
        self._paused += self._now() - start

    def _now(self) -> float:
        if self._on_device:
            # What is queued would be counted for the action that happens to wait for it. Of this
            # stream alone: on those of NCCL are messages that other ranks take or send later, some
            # only after what this rank does next.
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()

    def times(
        self,
        stage: int,
        kept: float,
        *,
        recomputes: bool,
        of: Callable[[Sequence[float]], float] = min,
    ) -> StageTimes:
        """What is known of a stage of this rank.

        Args:
            stage: its number.
            kept: bytes that a forward keeps.
            recomputes: whether its backwards come whole.
            of: one number of those of all microbatches; what else the machine did only adds.
        """
        one = {kind: of(found) for (at, kind), found in self.took.items() if at == stage}
        forward, whole = one.get("F", 0.0), one.get("B")
        inputs, weights = one.get("I"), one.get("W")
        if inputs is None or weights is None:
            # A backward that came whole: products for inputs and for weights are equally large.
            inputs = weights = (whole or 0.0) / 2
        return StageTimes(forward, inputs, weights, kept, 0.0 if recomputes else kept)


class KeptBytes:
    """Counts bytes that autograd saves, parameters and buffers of the model left out.

    Attributes:
        total: of the storages that were saved, each counted once.
    """

    def __init__(self, model: nn.Module) -> None:
        # They are there anyway: what a microbatch keeps beside them is what is asked.
        held = (*model.parameters(), *model.buffers())
        # A storage may be freed and its address used again: what is counted is kept for so long.
        self._seen: dict[int, Any] = {_address(one): None for one in held}
        self.total = 0

    def __enter__(self) -> KeptBytes:
        """Count from here on."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpacked)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """End."""
        self._hooks.__exit__(*exception)
        # It holds storages, which are to live no longer than they are counted.
        self._seen.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in self._seen:
            storage = local_of(tensor.detach()).untyped_storage()
            self._seen[address] = storage
            self.total += storage.nbytes()
        # Not itself: an output that its own node saved would never be freed.
        return tensor.detach()


def _unpacked(tensor: Tensor) -> Tensor:
    return tensor


def _address(tensor: Tensor) -> int:
    return int(local_of(tensor.detach()).untyped_storage().data_ptr())


def choose_schedule(
    schedule: Schedule,
    watch: Stopwatch,
    scene: RankStages,
    lines: Lines,
    memory: float | None,
    mesh: DeviceMesh,
) -> Schedule:
    """Return the schedule that runs from now on, the same on all ranks. Collective.

    Args:
        schedule: the one that was measured.
        watch: what this rank has measured of its stages.
        scene: this rank's part.
        lines: its connections.
        memory: bytes that a rank may keep.
        mesh: its ranks choose; others may run another model.

    Raises:
        PlanError: on every rank: none keeps as little as that.
    """
    rows = torch.zeros(schedule.stages, 5, dtype=torch.float64, device=lines.device)
    for stage, rank in enumerate(schedule.stage_ranks):
        if rank == lines.rank:
            again = stage in scene.recomputing
            found = watch.times(stage, float(scene.kept.get(stage, 0)), recomputes=again)
            rows[stage] = torch.tensor(
                list(vars(found).values()), dtype=torch.float64, device="cpu"
            )
    for stage, rank in enumerate(schedule.stage_ranks):
        # In the order of stages on all ranks: each is told by the rank that has it.
        rows[stage] = lines.broadcast(rows[stage].clone(), rank)
    times = [StageTimes(*row) for row in rows.tolist()]
    try:
        best = best_in_place(schedule, times, memory).schedule
        said = {"name": best.name, "times": rows.tolist()}
    except PlanError as error:
        said = {"error": str(error)}
    # Stages of other pipelines side by side measure other times; all have to choose alike.
    agreed = json.loads(broadcast_text(json.dumps(said), mesh_ranks(mesh)[0], everyone(mesh)))
    if "error" in agreed:
        raise PlanError(agreed["error"])
    ranks, chunks = len(schedule.ranks), schedule.stages // len(schedule.ranks)
    # By the agreed times as well: some schedules are made by them, and must be the same ones
    # everywhere.
    times = [StageTimes(*row) for row in agreed["times"]]
    return make_schedule(agreed["name"], ranks, schedule.microbatches, chunks=chunks, times=times)
