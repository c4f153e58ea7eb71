"""`visualize`: draws which ranks hold which part of a tensor. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vescale_dtensor._errors import LayoutError
from vescale_dtensor._inspect.visualize_panels import Picture, picture_of
from vescale_dtensor._inspect.visualize_svg import svg
from vescale_dtensor._inspect.visualize_text import text
from vescale_dtensor._tensor.dtensor import DTensor


def visualize(
    tensor: DTensor,
    *,
    dims: Sequence[int] | None = None,
    format: Literal["text", "svg"] = "text",
) -> str:
    """Draw which ranks hold which part of a tensor.

    Every cell of the picture is a part of the tensor, and names the ranks that hold it. `0+1`: a
    partial sum, the cell is the sum of what ranks 0 and 1 hold (`max(0, 1)`: the maximum). `0 = 2`
    and `0-3`: equal copies.

    Args:
        tensor: of any number of dims. Only its layout matters.
        dims: the two dims to draw, downwards and across, or one, across. Default: the first two
            sharded ones, else the last ones. Shards of other dims are drawn one panel each.
        format: `text`, in box-drawing characters, or `svg`, a complete document.

    Returns:
        The picture, without a newline at its end. It is the same on every rank.

    Raises:
        LayoutError: not a DTensor, dims that it does not have, or an unknown format.
    """
    if not isinstance(tensor, DTensor):
        raise LayoutError(f"visualize: expected a DTensor, found {type(tensor).__name__}")
    if format not in ("text", "svg"):
        raise LayoutError(f"visualize(format={format!r}): use 'text' or 'svg'")
    spec = tensor._spec
    chosen = _chosen(tensor, dims)
    picture: Picture = picture_of(spec.layout, tuple(spec.shape), spec.tensor_meta.dtype, chosen)
    return text(picture) if format == "text" else svg(picture)


def _chosen(tensor: DTensor, dims: Sequence[int] | None) -> tuple[int, ...]:
    """The dims to draw, non-negative.

    Raises:
        LayoutError: not one or two different dims of the tensor.
    """
    ndim = tensor.ndim
    if dims is None:
        sharded = [d for d in range(ndim) if any(p.is_sharded(d) for p in tensor.placements)]
        rest = [d for d in reversed(range(ndim)) if d not in sharded]
        return tuple(sorted((sharded + rest)[:2]))
    if not 0 < len(dims) <= 2 or any(not -ndim <= dim < ndim for dim in dims):
        raise LayoutError(
            f"visualize(dims={list(dims)}): give one or two dims of a tensor that has {ndim}"
        )
    normal = tuple(dim % ndim for dim in dims)
    if len(set(normal)) < len(normal):
        raise LayoutError(f"visualize(dims={list(dims)}): the two dims have to differ")
    return normal
