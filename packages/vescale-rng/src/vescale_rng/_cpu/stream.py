"""Moving a generator along its stream, by drawing or by jumping, whichever is cheaper."""

import torch

from vescale_rng._cpu import generator_state as cpu_state

# A jump costs 1.2 ms (10 ms when its distance is new), a drawn word 1.4 ns.
_JUMP_FROM = 1 << 20
_DRAWN_AT_ONCE = 1 << 16


def advance(words: int, generator: torch.Generator) -> None:
    """Move `generator` past `words` 32-bit draws; a cached normal sample stays."""
    if not words:
        return
    if words >= _JUMP_FROM:
        cpu_state.write(generator, cpu_state.read(generator).after(words))
        return
    # Short ways are drawn: cheaper than to read and write 5 KB of state, let alone to jump.
    # An int64 of all 64 bits takes two draws, at three quarters of the cost of two bytes.
    if words > 1:
        _draw(words // 2, torch.int64, generator)
    if words % 2:
        _draw(1, torch.uint8, generator)


def _draw(count: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Draw `count` random values of `dtype` and drop them."""
    if count <= _DRAWN_AT_ONCE // 2:  # most are that few, at every dropout of a layer
        torch.empty(count, dtype=dtype, device="cpu").random_(generator=generator)
        return
    sink = torch.empty(_DRAWN_AT_ONCE // 2, dtype=dtype, device="cpu")
    while count >= sink.numel():
        sink.random_(generator=generator)
        count -= sink.numel()
    if count:
        sink[:count].random_(generator=generator)


def has_normal(generator: torch.Generator) -> bool:
    """Tell whether `generator` keeps the second sample of a pair of normals for the next draw."""
    return cpu_state.read(generator).normal is not None


def drop_normal(generator: torch.Generator) -> None:
    """Use up the cached normal sample, which must be there: no word is drawn."""
    # A draw of one element takes the cached sample, and no word.
    torch.empty(1, dtype=torch.float32, device="cpu").normal_(generator=generator)
