"""`visualize`: which ranks hold which part of a tensor, as a picture. No communication."""

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

    Every cell of the picture is a part of the tensor, and names the ranks that hold it: `0+1` hold
    terms whose sum it is (`max(0, 1)`: their maximum), `0 = 2` and `0-3` hold equal copies.

    Args:
        tensor: of any number of dims. Only its layout is looked at.
        dims: the two dims to draw, downwards and across, or one, across. Default: the first two
            that are cut, then the last ones. What other dims are cut into is drawn one by one.
        format: `text`, in box-drawing characters, or `svg`, a complete document.

    Returns:
        The picture, without a newline at its end. It is the same on every rank.

    Raises:
        LayoutError: not a DTensor, dims that it lacks, or an unknown format.
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
    ndim = tensor.ndim
    if dims is None:
        cut = [d for d in range(ndim) if any(p.is_sharded(d) for p in tensor.placements)]
        rest = [d for d in reversed(range(ndim)) if d not in cut]
        return tuple(sorted((cut + rest)[:2]))
    if not 0 < len(dims) <= 2 or any(not -ndim <= dim < ndim for dim in dims):
        raise LayoutError(
            f"visualize(dims={list(dims)}): give one or two dims of a tensor that has {ndim}"
        )
    normal = tuple(dim % ndim for dim in dims)
    if len(set(normal)) < len(normal):
        raise LayoutError(f"visualize(dims={list(dims)}): the two dims have to differ")
    return normal
