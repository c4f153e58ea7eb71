"""Tensors of a batch that the model does not see (labels of a loss outside of it), distributed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from torch import Tensor, nn
from vescale_comm.nested import Copied, named_tensors_within
from vescale_dtensor import untraced

from vescale_parallel._step.parts import Part

_BATCH: Final = "_vescale_batch"
"""The attribute of a model that holds its `Distribution`: deep copies and compiled models lead to
it."""


class Distribution(Protocol):
    """How batches of a model are distributed."""

    def distributed(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        copied: Copied,
        *,
        beside: Mapping[str, Tensor] | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments with their tensors distributed; `copied` as of `map_tensors`.

        `beside`: tensors of the same batch, by name, which are not distributed here.
        """


def distribution_of(model: nn.Module) -> Distribution | None:
    """Return how batches of a model are distributed; None: they are not."""
    distribution: Distribution | None = getattr(model, _BATCH, None)
    return distribution


def install_distribution(model: nn.Module, distribution: Distribution) -> None:
    """Let `distribute_batch` distribute batches of a model by this."""
    setattr(model, _BATCH, distribution)


@untraced
def distribute_batch(model: nn.Module, *values: Any) -> Any:
    """Distribute tensors of a batch as calls of the model do, for what is outside of it.

    `x, y = distribute_batch(model, x, y)`: labels that only a loss sees then fit the output.
    With `Plan(batch_is="local")` each rank gives its own rows, any number of them; else each gives
    the whole batch. The model takes the result as it takes plain tensors, and so does a loop that
    was written for one device. Numbers that are drawn like it (`torch.randn_like(x)`) are those of
    the global batch; like a rank's own rows each rank would draw the same. Collective.

    Args:
        model: what `parallelize` returned. Any other model, or a plan without a batch: the values
            come back as they are.
        *values: tensors, or what has some: lists, tuples, dicts, dataclasses. Each has the batch
            where the plan says (`batch="dp:0"`: in dim 0); tensors without that dim stay plain.

    Returns:
        The value, or a tuple if there are several, with a DTensor of the global batch in the place
        of each plain tensor.

    Raises:
        DisagreementError: ranks pass other forms, or other values where they should be the same.
        PlanError: the whole batch stands beside a rank's own rows.
    """
    distribution = distribution_of(model)
    placed = values if distribution is None else distribution.distributed(values, {}, [])[0]
    return placed if len(values) != 1 else placed[0]


@untraced
def distribute_targets(model: nn.Module, part: Part) -> tuple[Any, ...]:
    """Return what a loss outside of the model takes beside its output, as `distribute_batch`."""
    distribution = distribution_of(model)
    if distribution is None or not part.targets:
        return part.targets
    given = named_tensors_within(part.args, "args") | named_tensors_within(part.kwargs, "kwargs")
    return distribution.distributed(part.targets, {}, [], beside=given)[0]
