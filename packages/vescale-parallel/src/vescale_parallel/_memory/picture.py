"""A memory plan as a picture: steps from left to right, addresses from the bottom up."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from vescale_parallel._common.messages import human_bytes
from vescale_parallel._memory.layout import ArenaLayout, Block

_WIDTH: Final = 1200
_HEIGHT: Final = 500
_MARGIN: Final = 24
_COLOURS: Final = ("#8ecae6", "#ffb703", "#90be6d", "#f28482", "#cdb4db", "#84a59d")


def as_svg(
    names: Sequence[str],
    blocks: Sequence[Block],
    layout: ArenaLayout,
    outside: Sequence[int],
    title: str,
) -> str:
    """Draw an arena over time, and on top of it what lives outside of it.

    Args:
        names: of the blocks, shown where the mouse rests.
        blocks: that lie in the arena.
        layout: where they lie.
        outside: bytes outside of the arena, at each step.
        title: written above.
    """
    highest = max(1, layout.size + max(outside, default=0))
    wide, tall = _WIDTH / max(1, len(outside)), _HEIGHT / highest
    drawn = [f'<text x="{_MARGIN}" y="{_MARGIN - 8}">{escape(title)}</text>']
    drawn += _rectangles(names, blocks, layout, wide, tall)
    drawn.append(_stacked(layout.size, outside, wide, tall))
    line = _y(layout.size, tall)
    drawn.append(
        f'<line x1="{_MARGIN}" x2="{_MARGIN + _WIDTH}" y1="{line:.2f}" y2="{line:.2f}" '
        f'stroke="black"/><text x="{_MARGIN + 4}" y="{line - 4:.2f}">arena, '
        f"{human_bytes(layout.size)}; above it what lies outside</text>"
    )
    width, height = _WIDTH + 2 * _MARGIN, _HEIGHT + 2 * _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12"><rect width="{width}" height="{height}" '
        f'fill="white"/>{"".join(drawn)}</svg>'
    )


def _y(address: int, tall: float) -> float:
    return _MARGIN + _HEIGHT - address * tall


def _rectangles(
    names: Sequence[str], blocks: Sequence[Block], layout: ArenaLayout, wide: float, tall: float
) -> Iterator[str]:
    for at, (name, block, offset) in enumerate(zip(names, blocks, layout.offsets, strict=True)):
        if not block.bytes:
            continue
        told = f"{name}: {block.bytes} B at {offset}, steps {block.first} to {block.last}"
        yield (
            f'<rect x="{_MARGIN + block.first * wide:.2f}" '
            f'y="{_y(offset + block.bytes, tall):.2f}" '
            f'width="{(block.last - block.first + 1) * wide:.2f}" '
            f'height="{block.bytes * tall:.2f}" fill="{_COLOURS[at % len(_COLOURS)]}" '
            f'stroke="white" stroke-width="0.3"><title>{escape(told)}</title></rect>'
        )


def _stacked(size: int, outside: Sequence[int], wide: float, tall: float) -> str:
    points = [f"{_MARGIN},{_y(size, tall):.2f}"]
    for step, live in enumerate(outside):
        y = _y(size + live, tall)
        # A step has two corners: what lives does not change within it.
        points += [f"{_MARGIN + end * wide:.2f},{y:.2f}" for end in (step, step + 1)]
    points.append(f"{_MARGIN + len(outside) * wide:.2f},{_y(size, tall):.2f}")
    return f'<polygon points="{" ".join(points)}" fill="#bbbbbb"/>'
