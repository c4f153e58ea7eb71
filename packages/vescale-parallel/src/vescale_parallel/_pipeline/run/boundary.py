"""Checks what the last block of a stage passes to the next stage, before it is sent.

A sender can still tell all ranks what is wrong; a receiver would take other bytes for its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from vescale_comm.nested import named_tensors_within

from vescale_parallel._common.messages import listed
from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.trace.foreign_values import ForeignValues
from vescale_parallel._pipeline.trace.tensor_specs import TensorSpec, local_of, spec_of


def handed_over(
    call: Mapping[str, Tensor], entry_paths: tuple[str, ...], stage: int, foreign: ForeignValues
) -> list[Tensor]:
    """The arguments that the stage after `stage` asked for.

    Raises:
        PipelineError: they are not there, or not known on this stage either.
    """
    missing = [path for path in entry_paths if path not in call or foreign.is_unknown(call[path])]
    if missing:
        raise PipelineError(
            f"stage {stage} cannot give {listed(missing)} of the (args, kwargs) of the next block: "
            "an earlier stage has them, and did not pass them on. Let every stage hold what makes "
            "them: Pipeline(everywhere=...)."
        )
    return [call[path] for path in entry_paths]


def check_specs(tensors: list[Tensor], specs: tuple[TensorSpec, ...], stage: int) -> list[Tensor]:
    """Return the local tensors, if they are what the next stage expects.

    Raises:
        PipelineError: they are not.
    """
    for one, spec in zip(tensors, specs, strict=True):
        if spec.placements is None and is_plainly(one, spec):
            continue
        found = spec_of(one)
        # Under no_grad nothing needs a gradient; what travels is the same.
        if found._replace(requires_grad=False) != spec._replace(requires_grad=False):
            raise PipelineError(
                f"stage {stage} gives {tuple(one.shape)} {one.dtype}, and the next one expects "
                f"{spec.global_shape} {spec.dtype} in the layout of the trial run."
            )
    return [local_of(one) for one in tensors]


def is_plainly(tensor: Tensor, spec: TensorSpec) -> bool:
    """Whether a plain tensor is what a spec says: the usual case, at a fifth of the price."""
    return (
        type(tensor) is Tensor
        and tensor.dtype is spec.dtype
        and tensor.shape == spec.shape
        and tensor.stride() == spec.stride
    )


def require_values(name: str, stage: int, given: tuple[Any, ...]) -> None:
    """Refuse what no mark showed: values of other stages that came by a hidden way.

    Args:
        name: of the unit that is called in a trial run.
        stage: whose it is.
        given: its (args, kwargs).

    Raises:
        PipelineError: a tensor holds no numbers.
    """
    for path, one in named_tensors_within(given).items():
        # Placeholders hold NaN in a trial run: what is computed from them, whichever way, shows.
        local = local_of(one.detach())
        if local.is_floating_point() and local.numel() and bool(local.isnan().all()):
            raise PipelineError(
                f"'{name}' on stage {stage} takes {path} of its (args, kwargs), in which there are "
                "no numbers: a value that only an earlier stage has went through code that torch "
                "does not show (an autograd.Function, a redistribution of the model's own), or the "
                "model has diverged. Let every stage hold what makes it: "
                "Pipeline(everywhere=...)."
            )
