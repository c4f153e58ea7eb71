"""Places in the stream: read one, go there, and know how far an op goes without running it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from vescale_rng import _generator_state, _stream
from vescale_rng import _portable as portable
from vescale_rng._consumption import consumption_of
from vescale_rng._devices import cpu_generator
from vescale_rng._distributions import Distribution
from vescale_rng._errors import RngError
from vescale_rng._fill import fill_
from vescale_rng._generator_state import Position
from vescale_rng._layout import Layout
from vescale_rng._ops import StreamOp
from vescale_rng._plan import Plan, plan_of
from vescale_rng._policy import policy


def position(generator: torch.Generator | None = None) -> Position:
    """Where ``generator`` (None: torch's default) stands: an immutable value to come back to."""
    return _generator_state.read(cpu_generator(generator))


def seek(place: Position, generator: torch.Generator | None = None) -> None:
    """Put ``generator`` (None: torch's default) at ``place``."""
    _generator_state.write(cpu_generator(generator), place)


@contextmanager
def at(place: Position, generator: torch.Generator | None = None) -> Iterator[None]:
    """Draw from ``place`` inside the ``with`` block, and from where it was after it.

    Args:
        place: what `position` answered earlier, or a place after it.
        generator: a CPU generator; None is torch's default.
    """
    before = position(generator)
    seek(place, generator)
    try:
        yield
    finally:
        seek(before, generator)


def advance(words: int, generator: torch.Generator | None = None) -> None:
    """Move ``generator`` past ``words`` 32-bit draws, as if they had been drawn.

    The cost grows with the logarithm of ``words``. A cached normal sample stays cached.

    Args:
        words: how many; `draws` says how many an op takes.
        generator: a CPU generator; None is torch's default.

    Raises:
        RngError: ``words`` is negative: a stream has no way back, but `seek` has.
    """
    if words < 0:
        raise RngError(f"a generator cannot be advanced by {words} draws; seek an earlier position")
    _stream.advance(words, cpu_generator(generator))


def draws(
    distribution: Distribution | StreamOp,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    memory_order: Sequence[int] | None = None,
    cached: bool = False,
) -> int:
    """How many 32-bit words an op on one device takes from the stream, without running it.

    Under the portable policy every op takes the two of its key, or none where there are no elements.

    Args:
        distribution: what it draws; or an op that is no distribution of one tensor (`RandPerm`,
            `Multinomial`, `BernoulliOf`). Dropout draws `Bernoulli`, that of features for the
            first two dims only; `F.gumbel_softmax` draws `Exponential`.
        shape: the global shape.
        dtype: of its tensor; None is torch's default.
        memory_order: dims from slowest to fastest in the tensor's memory; None is row-major.
        cached: whether a normal sample waits in the generator (`position().normal`): an op that
            draws normals in pairs takes it first.

    Raises:
        DistributionError: torch does not draw this for this dtype.
        LayoutError: an extent is negative, or the memory order is no permutation.
    """
    plan = _nothing_of(shape, memory_order)
    dtype = dtype or torch.get_default_dtype()
    if policy() == "portable":
        if isinstance(distribution, Distribution):
            portable.check(distribution, dtype)
        return portable.WORDS if plan.numel else 0
    if isinstance(distribution, StreamOp):
        return distribution.words(plan.layout.global_shape, dtype)
    consumption = consumption_of(distribution, dtype, plan.numel, plan.contiguous)
    return consumption.total(plan.numel, cached)


def skip(
    distribution: Distribution | StreamOp,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    memory_order: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Leave ``generator`` where an op leaves it, its cached normal sample included, undrawn.

    This is what `fill_` does on a rank that holds nothing.

    Args:
        distribution: what the op draws.
        shape: its global shape.
        dtype: of its tensor; None is torch's default.
        memory_order: dims from slowest to fastest in the tensor's memory; None is row-major.
        generator: a CPU generator; None is torch's default.

    Raises:
        DistributionError: torch does not draw this distribution for this dtype.
    """
    if isinstance(distribution, StreamOp):
        advance(draws(distribution, shape, dtype), generator)
        return
    layout = _nothing_of(shape, memory_order).layout
    fill_(torch.empty(0, dtype=dtype), distribution, layout, generator)


def _nothing_of(shape: Sequence[int], memory_order: Sequence[int] | None) -> Plan:
    """The plan of a rank that holds nothing of a tensor of that shape."""
    order = None if memory_order is None else tuple(memory_order)
    return plan_of(Layout(tuple(shape), (), memory_order=order), (0,), (1,))
