"""Merges the state that forwards of stages write, and sends it to all ranks.

One device runs a batch's microbatches one after another, and so does each stage: state that the
modules of one stage write is one device's on the ranks of that stage. Code outside of the blocks
runs on every stage, so that each stage of a rank has its own state there, and what is left is that
of the last stage which knows it. Buffers are part of a model's `state_dict()`: all ranks hear what
is in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.run.messages import Lines
from vescale_parallel._pipeline.run.rank_stages import RankStages
from vescale_parallel._pipeline.trace.foreign_values import ForeignValues
from vescale_parallel._pipeline.trace.module_state import Place, Write, copied, take_over
from vescale_parallel._pipeline.trace.tensor_specs import (
    TensorSpec,
    bytes_of,
    local_of,
    spec_of,
    wrapped,
)


def writes_of(
    stage: int, written: Mapping[Place, Any], foreign: ForeignValues
) -> tuple[Write, ...]:
    """What a forward of a stage has written, to be sent to all ranks."""
    return tuple(
        Write(
            stage,
            place,
            not foreign.unknown_within([value]),
            spec_of(value) if place.is_buffer and isinstance(value, Tensor) else None,
        )
        for place, value in written.items()
    )


def sources_of(writes: Iterable[Write]) -> dict[Place, Write]:
    """For each place the last stage that knows its value, and writes it."""
    return {one.place: one for one in writes if one.is_known}


class OwnState:
    """What several stages of one rank write, in a step: each stage has its own.

    Args:
        scene: this rank's part.
        writes: of all stages, in their order.
    """

    def __init__(self, scene: RankStages, writes: Iterable[Write]) -> None:
        self._model = scene.model
        own = [one for one in writes if scene.split.ranks[one.stage] == scene.rank]
        stages: dict[Place, dict[int, bool]] = {}
        for one in own:
            stages.setdefault(one.place, {})[one.stage] = one.is_known
        # The others simply stay in their modules.
        self._places = {p: s for p, s in stages.items() if len(s) > 1 or not all(s.values())}
        self._before = {place: place.value(self._model) for place in self._places}
        self._values: dict[int, dict[Place, Any]] = {}
        made: dict[int, dict[int, Any]] = {}
        self._copies = {
            (place, stage): copied(self._before[place], made.setdefault(stage, {}))
            for place, known in self._places.items()
            for stage in known
        }
        for (place, stage), value in self._copies.items():
            self._values.setdefault(stage, {})[place] = value

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """A forward of a stage runs."""
        values = self._values.get(stage, {})
        for place, value in values.items():
            place.put(self._model, value)
        try:
            yield
        finally:
            for place in values:
                values[place] = place.value(self._model)

    def end(self) -> None:
        """Leave what one device has, as far as a stage of this rank knows it."""
        for place, known in self._places.items():
            before = self._before[place]
            place.put(self._model, before)
            stage = max((one for one, is_known in known.items() if is_known), default=None)
            if stage is None:
                continue
            value = self._values[stage][place]
            if value is self._copies[place, stage]:
                # Others may hold the object.
                take_over(before, value)
            else:
                place.put(self._model, value)
        self._places = {}

    def drop(self) -> None:
        """Leave what was there before the step."""
        for place, value in self._before.items():
            place.put(self._model, value)
        self._places = {}


def require_specs(scene: RankStages, writes: Iterable[Write]) -> None:
    """Refuse buffers of this rank's stages that are not what other ranks expect.

    Raises:
        PipelineError: one is of another shape, dtype or layout than in the trial run.
    """
    for place, one in sources_of(writes).items():
        if not place.is_buffer or scene.split.ranks[one.stage] != scene.rank:
            continue
        value = place.value(scene.model)
        found = spec_of(value) if isinstance(value, Tensor) else None
        if _form(found) != _form(one.spec):
            raise PipelineError(
                f"a forward leaves {_spec_text(found)} in buffer '{place.module}.{place.name}', "
                f"and in its trial run left {_spec_text(one.spec)}: in stages a buffer that "
                "forwards write to keeps its shape and dtype. Keep what grows in an attribute that "
                "is no buffer."
            )


def _form(spec: TensorSpec | None) -> Any:
    return None if spec is None else (spec.dtype, spec.shape, spec.placements, spec.global_shape)


def _spec_text(spec: TensorSpec | None) -> str:
    return "None" if spec is None else f"{spec.global_shape} {spec.dtype}"


def tell_buffers(scene: RankStages, lines: Lines, writes: Iterable[Write]) -> None:
    """Let buffers that forwards have written be on every rank what they are on one. Collective."""
    every = [one for one in sources_of(writes).values() if one.place.is_buffer]
    for rank in sorted({scene.split.ranks[one.stage] for one in every}):
        here = [one for one in every if scene.split.ranks[one.stage] == rank]
        _tell(scene, lines, rank, here)


def _tell(scene: RankStages, lines: Lines, rank: int, writes: list[Write]) -> None:
    """Give buffers of one rank to the others, as one message of bytes."""
    sizes = [0 if one.spec is None else _bytes_of(one.spec) for one in writes]
    joined = torch.empty(sum(sizes), dtype=torch.uint8, device=lines.device)
    parts = torch.split(joined, sizes)
    if rank == lines.rank:
        for one, part in zip(writes, parts, strict=True):
            if one.spec is not None:
                part.copy_(bytes_of(local_of(one.place.value(scene.model))))
    if joined.numel():
        joined = lines.broadcast(joined, rank)
    if rank != lines.rank:
        for one, part in zip(writes, torch.split(joined, sizes), strict=True):
            _receive(scene, one, part)


def _bytes_of(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize


def _receive(scene: RankStages, write: Write, flat: Tensor) -> None:
    """Let a buffer have what has come for it, in its memory if it fits."""
    spec, place = write.spec, write.place
    if spec is None:
        place.put(scene.model, None)
        return
    # A clone, as bytes of other buffers before it may leave it off the dtype's boundaries.
    local = flat.clone().view(spec.dtype).reshape(spec.shape)
    before = place.value(scene.model)
    fits = isinstance(before, Tensor) and _form(spec_of(before)) == _form(spec)
    if fits:
        with torch.no_grad():
            local_of(before).detach().copy_(local)
    else:
        place.put(scene.model, wrapped(spec, local, scene.mesh))
