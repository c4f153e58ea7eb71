"""What `forward_backward` calls of a model in stages, or whose plan says microbatches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_dtensor import DTensor

from vescale_parallel._common.agreement import checksum, require_same
from vescale_parallel._common.mesh import mesh_ranks
from vescale_parallel._common.pytree import named_tensors_within
from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.finish import finish_gradients, loss_of_all, require_success
from vescale_parallel._pipeline.messages import Lines
from vescale_parallel._pipeline.rehearsal import Rehearsal
from vescale_parallel._pipeline.runner import Microbatch, Runner, forwards_only
from vescale_parallel._pipeline.stage import Kind, Scene
from vescale_parallel._pipeline.streams import after
from vescale_parallel._step.parts import Part, loss_of
from vescale_parallel._zero.schedule import SCHEDULE
from vescale_parallel._zero.schedule import Schedule as Zero

_CHECKED: Final = 2
"""How many batches are compared between ranks: a loader that is wrong is wrong from the start."""


def divided(part: Part, count: int, dim: int) -> list[tuple[Part, float]]:
    """Return microbatches and their shares of the rows; the last may have fewer than the others.

    Raises:
        PipelineError: rows that do not make so many microbatches.
        ParallelError: tensors of different numbers of rows, or none.
    """

    def dim_of(tensor: Tensor) -> int | None:
        return dim if tensor.ndim > dim else None

    if count == 1:
        return [(part, 1.0)]
    rows = part.rows(dim_of)
    size = -(-rows // count)
    if -(-rows // size) != count:
        raise PipelineError(
            f"forward_backward: {rows} rows do not make {count} microbatches: {size} rows each "
            f"make {-(-rows // size)}. Pass a batch of more rows, or plan fewer microbatches."
        )
    sizes = [min(size, rows - start) for start in range(0, rows, size)]
    parts = part.cut(dim_of, sizes)
    return [(one, length / rows) for one, length in zip(parts, sizes, strict=True)]


class MicrobatchStep:
    """Accumulates over microbatches, and reduces gradients once.

    Args:
        model: the parallelised model.
        microbatches: how many a batch is divided into.
        dim: the dim of rows.
    """

    def __init__(self, model: nn.Module, microbatches: int, dim: int) -> None:
        self._model, self._microbatches, self._dim = model, microbatches, dim

    def forward_backward(self, part: Part) -> Tensor:
        """Return the loss of the whole batch; gradients are left complete."""
        total: Tensor | None = None
        parts = divided(part, self._microbatches, self._dim)
        zero = getattr(self._model, SCHEDULE, None)
        for at, (one, weight) in enumerate(parts):
            keeps = isinstance(zero, Zero) and at + 1 < len(parts)
            with zero.no_sync() if keeps else nullcontext():  # type: ignore[union-attr]
                found = loss_of(one, self._model(*one.args, **one.kwargs)) * weight
                if found.requires_grad:
                    found.backward()  # type: ignore[no-untyped-call]
            value = found.detach()
            total = value if total is None else total + value
        assert total is not None
        whole: Tensor = total.full_tensor() if isinstance(total, DTensor) else total
        return whole


class StagedStep:
    """Runs the stages of a model by its schedule.

    Args:
        scene: this rank's part of the pipeline.
        lines: its connections.
        mesh: all ranks.
        dim: the dim of rows.
    """

    def __init__(self, scene: Scene, lines: Lines, mesh: DeviceMesh, dim: int) -> None:
        self._scene, self._lines, self._mesh, self._dim = scene, lines, mesh, dim
        self._unchecked = _CHECKED
        self._kinds: dict[Any, Kind] = {}

    def forward_backward(self, part: Part) -> Tensor:
        """Return the loss of the whole batch, on every rank; gradients are left complete.

        Dropout masks are those of one device that accumulates over the same microbatches, bit for
        bit, whatever the schedule. Under `torch.no_grad()` only the forward runs. Collective.

        Raises:
            PipelineError: on every rank: the batch cannot be divided, the model cannot run in
                stages as it is, or a rank failed: its own error there, elsewhere one that names it.
        """
        scene = self._scene
        if self._unchecked > 0:
            self._unchecked -= 1
            _require_same_batch(self._mesh, part)
        start = scene.streams.here()
        failure: Exception | None = None
        microbatches: list[Microbatch] = []
        try:
            microbatches = self._known(part)
        except Exception as error:
            failure = error
        require_success(failure, self._place)
        schedule = scene.split.schedule
        if not torch.is_grad_enabled():
            schedule = forwards_only(schedule)
        runner = Runner(scene, self._lines, schedule, microbatches)
        failure = runner.run()
        scene.streams.seek(microbatches[-1].end)
        try:
            require_success(failure, self._place)
        except Exception:
            # What was learned may be what was wrong: the next call looks again.
            self._kinds.clear()
            scene.streams.seek(start)
            raise
        total = loss_of_all(runner.loss, microbatches[-1].kind, scene, self._lines)
        if torch.is_grad_enabled():
            trained = [one for one in scene.model.parameters() if one.requires_grad]
            finish_gradients(trained, self._lines)
        return total

    @property
    def _place(self) -> str:
        split = self._scene.split
        own = [str(i) for i, rank in enumerate(split.ranks) if rank == self._scene.rank]
        return f"stage {', '.join(own)}"

    def _known(self, part: Part) -> list[Microbatch]:
        """The microbatches, and where in the streams each begins; new kinds are rehearsed."""
        place = self._scene.streams.here()
        made = []
        for one, weight in divided(part, self._scene.split.schedule.microbatches, self._dim):
            key = _kind_of(self._scene.model, one)
            kind = self._kinds.get(key)
            if kind is None:
                # With a graph also for an evaluation: what needs gradients is known for both.
                with torch.enable_grad():
                    kind = Rehearsal(self._scene, self._lines).run(one)
                self._kinds[key] = kind
            end = after(place, kind.total)
            made.append(Microbatch(one, weight, kind, place, end))
            place = end
        return made


def _kind_of(model: nn.Module, part: Part) -> Any:
    found = named_tensors_within((part.args, part.kwargs, part.targets))
    shapes = tuple((path, tuple(one.shape), one.dtype) for path, one in found.items())
    plain = tuple((k, v) for k, v in part.kwargs.items() if isinstance(v, bool | int | str))
    return shapes, plain, tuple(module.training for module in model.modules())


def _require_same_batch(mesh: DeviceMesh, part: Part) -> None:
    found = {
        **named_tensors_within(part.args, "args"),
        **named_tensors_within(part.kwargs, "kwargs"),
        **named_tensors_within(part.targets, "loss"),
    }
    plain = {name: one for name, one in found.items() if not isinstance(one, DTensor)}
    facts = {
        "tensor": {name: f"{tuple(one.shape)} {one.dtype}" for name, one in plain.items()},
        "value of": {name: f"checksum {checksum(one):08x}" for name, one in plain.items()},
    }
    head = "the batches that forward_backward is given differ between ranks:"
    advice = "Pass the whole batch on every rank, on those of other stages as well."
    require_same(facts, peers=mesh_ranks(mesh), head=head, advice=dict.fromkeys(facts, advice))
