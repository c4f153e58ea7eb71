"""Places in the stream: read one, go there, and know how far an op goes without running it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeGuard

import torch

from vescale_rng import _portable as portable
from vescale_rng._arguments import checked
from vescale_rng._cpu import generator_state as cpu_state
from vescale_rng._cpu import stream
from vescale_rng._cpu.draw_order import draw_order_of
from vescale_rng._cpu.generator_state import Position
from vescale_rng._cpu.stream_ops import BernoulliOf, Dropout, StreamOp
from vescale_rng._cuda import generator_state as cuda_state
from vescale_rng._cuda.bernoulli import WORDS as BERNOULLI_WORDS
from vescale_rng._cuda.device import threads_of
from vescale_rng._cuda.dropout import words_of_dropout
from vescale_rng._cuda.fill import words_of_fill
from vescale_rng._cuda.generator_state import CudaPosition
from vescale_rng._distributions import Distribution, Normal
from vescale_rng._draw.devices import cpu_generator
from vescale_rng._draw.fill import fill_
from vescale_rng._errors import DeviceError, DistributionError, RngError
from vescale_rng._layout.fill_plan import fill_plan_of
from vescale_rng._layout.layout import ShardLayout, integers
from vescale_rng._layout.real_layout import real_layout_of
from vescale_rng._policy import policy


@checked()
def position(generator: torch.Generator | None = None) -> Position | CudaPosition:
    """Tell where `generator` stands: an immutable value to come back to.

    Args:
        generator: on CPU or CUDA; None is torch's default on CPU.
    """
    if _is_cuda(generator):
        return cuda_state.read(generator)
    return cpu_state.read(cpu_generator(generator))


@checked()
def seek(place: Position | CudaPosition, generator: torch.Generator | None = None) -> None:
    """Set `generator` to `place`.

    Args:
        place: of a generator of the same kind of device.
        generator: on CPU or CUDA; None is torch's default on CPU.

    Raises:
        DeviceError: the place is one of another kind of generator.
    """
    if not isinstance(place, (Position, CudaPosition)):
        raise DeviceError(f"`place`: what position() returned: got {place!r:.80}")
    # The words of two engines have nothing in common: a place of one means nothing in the other.
    if _is_cuda(generator) != isinstance(place, CudaPosition):
        where = "cpu" if generator is None else generator.device
        raise DeviceError(f"a {type(place).__name__} is no place of a generator on {where}")
    if isinstance(place, CudaPosition):
        assert generator is not None
        cuda_state.write(generator, place)
        return
    cpu_state.write(cpu_generator(generator), place)


@checked()
@contextmanager
def at(place: Position | CudaPosition, generator: torch.Generator | None = None) -> Iterator[None]:
    """Draw from `place` inside the `with` block, and from where it was after it.

    Args:
        place: what `position` answered earlier, or a place after it.
        generator: on CPU or CUDA; None is torch's default on CPU.
    """
    # The whole state, a cached normal included: what is drawn inside leaves no trace.
    before = position(generator)
    seek(place, generator)
    try:
        yield
    finally:
        seek(before, generator)


@checked()
def advance(words: int, generator: torch.Generator | None = None) -> None:
    """Move `generator` past `words` 32-bit draws, as if they had been drawn.

    The cost grows with the logarithm of `words`. A cached normal sample stays cached.

    Args:
        words: how many; `draws` says how many an op takes.
        generator: on CPU or CUDA; None is torch's default on CPU.

    Raises:
        RngError: `words` is negative: a stream has no way back, but `seek` has.
    """
    if words < 0:
        raise RngError(
            f"`words`: a generator cannot be advanced by {words} draws; seek an earlier position"
        )
    if _is_cuda(generator):
        # Philox has no state but its counter: going on is an addition.
        cuda_state.write(generator, cuda_state.read(generator).after(words))
        return
    stream.advance(words, cpu_generator(generator))


@checked()
def draws(
    distribution: Distribution | StreamOp,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    memory_order: Sequence[int] | None = None,
    cached: bool = False,
    device: torch.device | str = "cpu",
) -> int:
    """Count the 32-bit words that an op on one device takes from the stream, without running it.

    Under the portable policy an op takes those of its key, or none if there are no elements; there
    `device` is that of the generator.

    Args:
        distribution: what it draws; or an op that is no distribution of one tensor (`RandPerm`,
            `Multinomial`, `BernoulliOf`, `Dropout`). Dropout of features draws `Bernoulli` for the
            first two dims only; `F.gumbel_softmax` draws `Exponential`.
        shape: the global shape.
        dtype: of its tensor; None is torch's default.
        memory_order: dims from slowest to fastest in the tensor's memory; None is row-major.
        cached: whether a normal sample waits in the generator (`position().normal`): an op that
            draws normals in pairs takes it first.
        device: "cpu" or a CUDA device, where the answer is what the generator's offset grows by.

    Raises:
        DistributionError: torch does not draw this for this dtype.
        LayoutError: an extent is negative, or the memory order is no permutation.
    """
    if not isinstance(distribution, Distribution | StreamOp):
        raise DistributionError(
            f"`distribution`: a value such as Normal() or RandPerm(): got {distribution!r:.80}"
        )
    plan = fill_plan_of(_nothing_of(shape, memory_order), (0,), (1,))
    dtype = dtype or torch.get_default_dtype()
    if dtype.is_complex and isinstance(distribution, Normal):  # drawn as real and imaginary parts
        plan = fill_plan_of(real_layout_of(plan.layout), (0, 2), (2, 1))
        dtype = dtype.to_real()
    # Whatever is drawn, one key is: but what torch refuses is refused first.
    if policy() == "portable":
        if isinstance(distribution, Distribution):
            portable.check(distribution, dtype)
        where = torch.device(device)
        # A CUDA generator's offset moves by multiples of 4.
        words = portable.WORDS if where.type == "cpu" else portable.WORDS_ON_CUDA
        return words if plan.numel else 0
    if (where := torch.device(device)).type == "cuda":
        return _draws_on_cuda(distribution, plan.numel, dtype, where)
    if isinstance(distribution, StreamOp):
        return distribution.words(plan.layout.global_shape, dtype)
    # By the memory, too: torch draws tensors with gaps one by one, and others in vectors of 16.
    draw_order = draw_order_of(distribution, dtype, plan.numel, plan.contiguous)
    return draw_order.total(plan.numel, cached)


@checked()
def skip(
    distribution: Distribution | StreamOp,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    memory_order: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Leave `generator` where an op leaves it, its cached normal sample included, undrawn.

    This is what `fill_` does on a rank that holds nothing.

    Args:
        distribution: what the op draws.
        shape: its global shape.
        dtype: of its tensor; None is torch's default.
        memory_order: dims from slowest to fastest in the tensor's memory; None is row-major.
        generator: on CPU or CUDA; None is torch's default on CPU.

    Raises:
        DistributionError: torch does not draw this distribution for this dtype.
    """
    # These leave nothing cached behind: their words are all that they change.
    if isinstance(distribution, StreamOp) or _is_cuda(generator):
        device = "cpu" if generator is None else generator.device
        advance(draws(distribution, shape, dtype, device=device), generator)
        return
    # Through `fill_` itself, which knows what stays cached: a second account of it could differ.
    layout = _nothing_of(shape, memory_order)
    fill_(torch.empty(0, dtype=dtype, device="cpu"), distribution, layout, generator)


def _is_cuda(generator: torch.Generator | None) -> TypeGuard[torch.Generator]:
    return generator is not None and generator.device.type == "cuda"


def _draws_on_cuda(
    distribution: Distribution | StreamOp, numel: int, dtype: torch.dtype, device: torch.device
) -> int:
    match distribution:
        case Distribution():
            return words_of_fill(distribution, dtype, numel, threads_of(device))
        case Dropout():
            return words_of_dropout(numel, threads_of(device))
        case BernoulliOf():
            return BERNOULLI_WORDS if numel else 0
    raise DistributionError(f"{distribution} is drawn on cpu only: it has no place on {device}")


def _nothing_of(shape: Sequence[int], memory_order: Sequence[int] | None) -> ShardLayout:
    """Return the layout of a rank that holds nothing of a tensor of that shape."""
    # Checked before the plan: its errors would speak of boxes that nobody gave.
    order = None if memory_order is None else integers("memory_order", memory_order)
    return ShardLayout(integers("shape", shape), (), memory_order=order)
