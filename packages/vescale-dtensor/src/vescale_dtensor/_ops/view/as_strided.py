"""`as_strided`: windows on memory, where one device's memory is known.

No rank has the storage of one device. But the elements of a dense tensor are the memory that starts
at its first element, so windows that stay within them can be taken of the tensor. What surrounds a
view in its storage, and where the view starts there, is not known here: such windows are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._dispatch.fallback import fallback
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._tensor.copied_views import mark_copy
from vescale_dtensor._tensor.dtensor import DTensor


def _strided_view(x: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    # Of the global tensor in the memory order of one device. Cloned, since windows may overlap, and
    # such strides belong to no layout.
    return x.as_strided(size, stride).clone(memory_format=torch.contiguous_format)


_strided_view.__name__ = _strided_view.__qualname__ = "as_strided"


def _as_strided(copies: bool) -> Callable[..., Tensor]:
    def run(
        input: DTensor,
        size: Sequence[int],
        stride: Sequence[int],
        storage_offset: int | None = None,
    ) -> Tensor:
        reach = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        known = storage_offset is None and not input._spec.has_gaps
        if not known or not input.numel() or (0 not in size and reach >= input.numel()):
            raise UnsupportedError(
                f"as_strided({list(size)}, {list(stride)}, {storage_offset}) of {input!r}: it has "
                "no memory of its own, and these windows reach beyond its elements, or start where "
                "its storage does. Use x.to_local() for this rank's piece or x.full_tensor() for "
                "the whole."
            )
        found: Any = fallback(_strided_view, (input, size, stride), {})
        if not copies:
            mark_copy(found, input)  # one device would write through it
        return found  # type: ignore[no-any-return]

    return run


HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.as_strided: _as_strided(copies=False),
    torch.as_strided: _as_strided(copies=False),
    torch.as_strided_copy: _as_strided(copies=True),
}
