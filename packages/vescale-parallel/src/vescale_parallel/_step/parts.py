"""The arguments of a step, cut into parts by rows; and what `loss=` means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor
from vescale_comm.nested import map_tensors, named_tensors_within

from vescale_parallel._common.messages import listed
from vescale_parallel._errors import ParallelError


@dataclass(frozen=True)
class Part:
    """Arguments of a model, and of its loss.

    Attributes:
        args: of the model.
        kwargs: of the model.
        loss: called with the output and `targets`; None: the output has the loss.
        targets: further arguments of `loss`.
        scale: what the loss is multiplied by before it is weighted by rows.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[..., Tensor] | None
    targets: tuple[Any, ...] = ()
    scale: float = 1.0

    @property
    def adds_up(self) -> bool:
        """Whether losses of parts are added and not averaged.

        With `num_items_in_batch` models of Hugging Face divide the sum over a part's tokens by the
        number of them in the whole batch.
        """
        return self.kwargs.get("num_items_in_batch") is not None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Any) -> Part:
        """Read `loss=`.

        Raises:
            ParallelError: neither None, nor a function, nor a tuple that begins with one.
        """
        function, *targets = loss if isinstance(loss, tuple) and loss else (loss,)
        if function is not None and not callable(function):
            raise ParallelError(
                f"forward_backward(loss={loss!r}): a function of the model's output, or a tuple of "
                "a function and the arguments that follow the output, as (cross_entropy, targets)."
            )
        return cls(args, dict(kwargs), function, tuple(targets))

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors among the arguments, by where they are: "args[0]", "loss[1]"."""
        return self._tensors

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        # Looked for once: a step asks for them to compare calls, to count rows, to tell kinds.
        return {
            **named_tensors_within(self.args, "args"),
            **named_tensors_within(self.kwargs, "kwargs"),
            **named_tensors_within(self.targets, "loss"),
        }

    def rows(self, dim_of: Callable[[Tensor], int | None]) -> int:
        """Return the number of rows of the batch.

        Args:
            dim_of: the dim of a tensor that holds the batch; None where it has none.

        Raises:
            ParallelError: tensors have different numbers of rows, or none has any.
        """
        found: dict[int, list[str]] = {}
        for name, tensor in self.tensors().items():
            dim = dim_of(tensor)
            if dim is not None:
                found.setdefault(tensor.shape[dim], []).append(name)
        if len(found) != 1 or 0 in found:
            said = "; ".join(f"{rows} rows in {listed(names)}" for rows, names in found.items())
            raise ParallelError(
                f"forward_backward cuts a batch by its rows, and found {said or 'no tensor'}. Give "
                "all tensors of the batch the same number of rows, one or more; what belongs to no "
                "row (a scale, a table) is a tensor without dims, a number, or a buffer."
            )
        return next(iter(found))

    def cut(self, dim_of: Callable[[Tensor], int | None], sizes: Sequence[int]) -> list[Part]:
        """Return the parts of so many rows, views of the same memory; their sum is `rows`."""
        total, starts = sum(sizes), [sum(sizes[:at]) for at in range(len(sizes))]
        places = list(zip(starts, sizes, strict=True))

        def cut(tensor: Tensor, place: Place) -> Tensor:
            dim = dim_of(tensor)
            return tensor if dim is None else tensor.narrow(dim, *place)

        cuts = [_cut_within(one, cut, places) for one in (self.args, self.kwargs, self.targets)]
        return [
            Part(
                args,
                kwargs,
                self.loss,
                targets,
                # Takes back the weight by rows, with which a mean counts.
                self.scale * total / size if self.adds_up else self.scale,
            )
            for args, kwargs, targets, size in zip(*cuts, sizes, strict=True)
        ]


Place = tuple[int, int]
"""The first row of a part, and how many it has."""


def _cut_within(value: Any, cut: Callable[..., Tensor], places: list[Place]) -> Any:
    """What each part has in place of a value with tensors in it."""
    # Mostly there are tensors and nothing around them: without a walk for each part.
    if type(value) is tuple and all([isinstance(one, Tensor) for one in value]):
        return [tuple([cut(one, place) for one in value]) for place in places]
    return [map_tensors(partial(cut, place=place), value) for place in places]


def loss_of(part: Part, output: Any) -> Tensor:
    """Return the loss of a part, from what the model returned for it.

    Raises:
        ParallelError: it is no tensor of one element.
    """
    if part.loss is not None:
        found = part.loss(output, *part.targets)
    elif isinstance(output, Mapping) and "loss" in output:
        found = output["loss"]
    else:
        found = getattr(output, "loss", output)
    if not isinstance(found, Tensor) or found.numel() != 1:
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ParallelError(
            f"forward_backward needs one number as the loss and found {what}. Let the model return "
            "its loss, or pass loss=, a function of its output."
        )
    return found if part.scale == 1.0 else found * part.scale
