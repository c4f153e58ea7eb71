"""The output of a model whose last stage is elsewhere: the same nesting on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from vescale_comm.nested import map_tensors, named_tensors_within

from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.run.messages import Lines
from vescale_parallel._pipeline.run.rank_stages import RankStages
from vescale_parallel._pipeline.trace.tensor_specs import (
    as_strided_like,
    describe,
    local_of,
    wrapped,
)
from vescale_parallel._pipeline.trace.text import to_text


class Evaluates(Protocol):
    """What runs a forward of all stages."""

    def evaluate(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what the model returns, on every rank. Collective."""


def require_no_cache(kwargs: Mapping[str, Any]) -> None:
    """Refuse caches of keys and values: each stage would fill its own blocks' part only.

    Raises:
        PipelineError: one is asked for.
    """
    if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
        raise PipelineError(
            "a model in stages has no cache of keys and values: each stage would fill the part of "
            "its own blocks. Pass use_cache=False, also to generate(...)."
        )


def transfer_problem(output: Any) -> Exception | None:
    """Why an output could not be sent to other stages, if it could not."""
    try:
        to_text(describe(output))
    except PipelineError as error:
        return error
    return None


def broadcast_output(output: Any, scene: RankStages, lines: Lines) -> Any:
    """Return the output of the last stage on every rank. Collective.

    Args:
        output: on the last stage what the model returned; elsewhere anything.
        scene: this rank's part.
        lines: its connections.
    """
    last = scene.split.ranks[-1]
    is_here = lines.rank == last
    described = lines.broadcast_object(describe(output) if is_here else None, last)
    given = list(named_tensors_within(output).values()) if is_here else []
    found: list[Tensor] = []
    for at, spec in enumerate(described.specs):
        # Row-major on its way, whatever its strides are.
        local = (
            local_of(given[at].detach()).contiguous()
            if is_here
            else torch.empty(spec.shape, dtype=spec.dtype, device=lines.device)
        )
        local = lines.broadcast(local, last)
        found.append(wrapped(spec, as_strided_like(local.reshape(-1), spec), scene.mesh))
    # The last stage has the model's own object, of whatever class.
    return output if is_here else map_tensors(lambda one: found[int(one)], described.nesting)
