"""Finds how an op consumes the stream, in one of three ways, by asking the installed torch.

torch fills a tensor from its serial CPU generator in one of three ways, and which one, and how
many 32-bit words each element takes, depends on the distribution, the dtype, the size, the
memory order, and the version (ATen/native/cpu/DistributionTemplates.h).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from vescale_rng._cpu import generator_state as cpu_state
from vescale_rng._distributions import Distribution
from vescale_rng._errors import DistributionError

# The Box-Muller blocks of a contiguous `normal_`; a smaller tensor is drawn in pairs.
BLOCK = 16


@dataclass(frozen=True)
class Elements:
    """Every element takes the same number of words, in memory order."""

    words: int

    def total(self, numel: int, cached: bool) -> int:
        """Return the words that a tensor of `numel` elements takes."""
        return numel * self.words


@dataclass(frozen=True)
class Blocks:
    """Blocks of 16 elements; the last 16 are drawn anew when the size is no multiple of 16.

    Attributes:
        words: words per element.
        incomplete: whether the elements of the incomplete last block take words as well, before
            all of the last 16 are drawn anew. Differs over versions and dtypes.
    """

    words: int
    incomplete: bool

    def body(self, numel: int) -> int:
        """Return the words before those of the last 16 elements that are drawn anew."""
        return (numel if self.incomplete else numel // BLOCK * BLOCK) * self.words

    def total(self, numel: int, cached: bool) -> int:
        """Return the words that a tensor of `numel` elements takes."""
        return self.body(numel) + (BLOCK * self.words if numel % BLOCK else 0)


@dataclass(frozen=True)
class Pairs:
    """Two elements from one pair of uniforms; an odd one out stays cached in the generator."""

    words: int

    def total(self, numel: int, cached: bool) -> int:
        """Return the words of `numel` elements, of which the first may come from the cache."""
        # An odd one at the end takes a whole pair; its second half is what the next draw finds
        # cached.
        return (numel - cached + 1) // 2 * self.words if numel else 0


DrawOrder = Elements | Blocks | Pairs


def draw_order_of(
    distribution: Distribution, dtype: torch.dtype, numel: int, contiguous: bool
) -> DrawOrder:
    """Tell how an op on a tensor of `numel` elements, row-major or not, consumes the stream.

    Raises:
        DistributionError: torch refuses the parameters or the dtype, or draws in a way that
            cannot be drawn in parts.
    """
    # Also for no elements at all: what torch refuses, every rank refuses.
    large, small = _measure(distribution, dtype)
    return large if contiguous and numel >= BLOCK else small


@lru_cache(maxsize=4096)
def _measure(distribution: Distribution, dtype: torch.dtype) -> tuple[DrawOrder, DrawOrder]:
    """Measure the draw orders of large contiguous tensors, and of all others."""
    # Facts of this torch version, not of this module: each op is run on tensors of a few elements.
    one, pending = _run(distribution, _scratch(1, dtype))
    small: DrawOrder = Pairs(one) if pending else Elements(one)
    large = small
    # A paired draw of 17 leaves an odd one out; a draw in blocks never touches the cache.
    block, _ = _run(distribution, _scratch(BLOCK, dtype))
    odd, pending_odd = _run(distribution, _scratch(BLOCK + 1, dtype))
    if pending and not pending_odd:
        words = block // BLOCK
        # Of 17 elements, 16 and then the last 16 anew are two blocks. A version that draws all 17
        # before takes more.
        large = Blocks(words, incomplete=odd > 2 * block)
    # A torch that draws in yet another way (in bulk from one seed, say) shows here.
    for kind, sizes in ((small, (2, 3, 15)), (large, (16, 17, 31, 32, 48))):
        for size in sizes:
            found, _ = _run(distribution, _scratch(size, dtype))
            if found != kind.total(size, cached=False):
                raise _not_divisible(distribution, dtype)
    # Equal words are not enough: a draw may hand them to its elements in another order.
    if not _splits(distribution, dtype):
        raise _not_divisible(distribution, dtype)
    return large, small


def _scratch(numel: int, dtype: torch.dtype) -> torch.Tensor:
    # Said, as wherever memory is made here: under `torch.device("meta")` torch would draw nothing,
    # the answer would be no words, and it would be kept for later fills.
    return torch.empty(numel, dtype=dtype, device="cpu")


def _run(distribution: Distribution, out: torch.Tensor) -> tuple[int, bool]:
    """Return the words that one op takes (at most 624), and whether a normal stays cached."""
    generator = torch.Generator().manual_seed(0)
    try:
        distribution.draw(out, generator)
    except (RuntimeError, TypeError, ValueError) as error:
        # All that torch looks at here is global, so every rank gets here or none.
        reason = str(error).splitlines()[0]
        raise DistributionError(
            f"{distribution} cannot be drawn for {out.dtype}: torch says {reason!r}"
        ) from error
    position = cpu_state.read(generator)
    # A fresh generator has used up a block that is never handed out: its index counts the words.
    return position.index, position.normal is not None


def _splits(distribution: Distribution, dtype: torch.dtype) -> bool:
    """Tell whether two calls in a row give what one call gives."""
    whole, halves = _scratch(3 * BLOCK, dtype), _scratch(3 * BLOCK, dtype)
    distribution.draw(whole, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    distribution.draw(halves[:BLOCK], generator)
    distribution.draw(halves[BLOCK:], generator)
    # By bytes: a distribution may be made of NaN.
    return torch.equal(whole.view(torch.uint8), halves.view(torch.uint8))


def _not_divisible(distribution: Distribution, dtype: torch.dtype) -> DistributionError:
    return DistributionError(
        f"{distribution} for {dtype}: torch {torch.__version__} does not draw it element by "
        "element on CPU, so a piece of it cannot be drawn alone"
    )
