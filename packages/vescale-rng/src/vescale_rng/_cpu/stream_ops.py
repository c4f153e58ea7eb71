"""Ops that are no distribution of one tensor, as values: how far each moves the stream."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import torch

from vescale_rng._arguments import DTYPE, INTEGER, TRUTH, argument_error
from vescale_rng._cpu import generator_state as cpu_state
from vescale_rng._cpu.draw_order import draw_order_of
from vescale_rng._distributions import Bernoulli
from vescale_rng._errors import DistributionError


@dataclass(frozen=True)
class StreamOp(ABC):
    """An op of which only the words are asked: `draws(op, shape, dtype)`."""

    @abstractmethod
    def words(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the words that it takes on one device, for a global input of that shape and dtype.

        Raises:
            DistributionError: torch refuses it.
        """


_WIDE_PERMUTATION = (2**32 - 1) // 20
"""The length from which ATen's `randperm_cpu` draws 64 bits for a place."""


@dataclass(frozen=True)
class RandPerm(StreamOp):
    """`torch.randperm(n)`; its shape is (n,)."""

    def words(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """See `StreamOp.words`."""
        each = _linear("randperm", lambda n, g: torch.randperm(n + 1, generator=g, device="cpu"))
        if prod(shape) >= _WIDE_PERMUTATION:
            return 2 * prod(shape)  # also for the last place: not measured, which takes gigabytes
        # The last place of a permutation has one choice left, and draws nothing.
        return max(0, prod(shape) - 1) * each


@dataclass(frozen=True)
class BernoulliOf(StreamOp):
    """`Tensor.bernoulli_(p)` and `torch.bernoulli(p)` with a tensor of probabilities.

    Attributes:
        p_dtype: of the probabilities; None is that of the tensor.
    """

    p_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Refuse what is no dtype."""
        if self.p_dtype is not None and not isinstance(self.p_dtype, torch.dtype):
            raise argument_error("p_dtype", DTYPE, self.p_dtype)

    def words(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """See `StreamOp.words`."""
        return prod(shape) * words_of_bernoulli(dtype, self.p_dtype or dtype)


@dataclass(frozen=True)
class Multinomial(StreamOp):
    """`torch.multinomial`; its shape is that of the probabilities."""

    num_samples: int
    replacement: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no number of samples."""
        for name, kind in (("num_samples", INTEGER), ("replacement", TRUTH)):
            if not kind.holds(getattr(self, name)):
                raise argument_error(name, kind, getattr(self, name))

    def words(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """See `StreamOp.words`."""
        *rows, categories = shape
        if self.num_samples < 1 or (not self.replacement and self.num_samples > categories):
            raise DistributionError(f"{self} of {categories} categories: there are not so many")
        # One sample with replacement is drawn as one without: torch takes the faster way.
        if self.replacement and self.num_samples > 1:
            return prod(rows) * self.num_samples * _words_of_sample(dtype)
        return prod(shape) * _words_of_race(dtype)


@dataclass(frozen=True)
class Dropout(StreamOp):
    """`F.dropout(x, p)` with p between 0 and 1, and `native_dropout`."""

    def words(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """See `StreamOp.words`."""
        draw_order = draw_order_of(Bernoulli(0.5), dtype, prod(shape), True)
        return draw_order.total(prod(shape), cached=False)


@cache
def words_of_bernoulli(dtype: torch.dtype, p_dtype: torch.dtype) -> int:
    """Return the words of one element of `bernoulli_` with a tensor of probabilities."""

    def run(n: int, generator: torch.Generator) -> None:
        out = torch.empty(n, dtype=dtype, device="cpu")
        out.bernoulli_(torch.full((n,), 0.5, dtype=p_dtype, device="cpu"), generator=generator)

    return _linear(f"bernoulli_ of {dtype} with probabilities of {p_dtype}", run)


@cache
def _words_of_sample(dtype: torch.dtype) -> int:
    ones = torch.ones(1, 3, dtype=dtype, device="cpu")
    return _linear(
        f"multinomial with replacement of {dtype}",
        lambda n, g: torch.multinomial(ones.expand(n, 3), 2, True, generator=g),
        per=2,
    )


@cache
def _words_of_race(dtype: torch.dtype) -> int:
    ones = torch.ones(1, 2, dtype=dtype, device="cpu")
    return _linear(
        f"multinomial without replacement of {dtype}",
        lambda n, g: torch.multinomial(ones.expand(n, 2), 1, generator=g),
        per=2,
    )


def _linear(what: str, run: Callable[[int, torch.Generator], object], per: int = 1) -> int:
    """Return the words of one of `n * per` equal draws that `run(n, generator)` makes.

    Raises:
        DistributionError: torch refuses, or takes something else than equal numbers.
    """
    # Sizes around those at which kernels change: one, a pair, a block of 16 and one more.
    found = []
    for n in (1, 2, 17, 33):
        generator = torch.Generator().manual_seed(0)
        try:
            run(n, generator)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise DistributionError(f"{what}: torch says {reason!r}") from error
        # A fresh generator has used up a block that is never handed out: its index counts words.
        found.append((n * per, cpu_state.read(generator).index))
    words = found[0][1] // per
    # A torch that draws in bulk from one seed, or by size, shows here and is refused.
    if any(total != count * words for count, total in found):
        raise DistributionError(
            f"torch {torch.__version__} does not draw {what} element by element on CPU, so a "
            "piece of it cannot be drawn alone"
        )
    return words
