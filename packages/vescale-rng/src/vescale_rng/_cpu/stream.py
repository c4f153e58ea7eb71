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
    pairs = words // 2
    if pairs > _DRAWN_AT_ONCE // 2:
        _draw_in_turns(pairs, generator)
    elif pairs:
        torch.empty(pairs, dtype=torch.int64, device="cpu").random_(generator=generator)
    if words % 2:
        torch.empty(1, dtype=torch.uint8, device="cpu").random_(generator=generator)


def _draw_in_turns(pairs: int, generator: torch.Generator) -> None:
    """Draw so many pairs of words and drop them, into one piece of memory again and again."""
    sink = torch.empty(_DRAWN_AT_ONCE // 2, dtype=torch.int64, device="cpu")
    while pairs >= sink.numel():
        sink.random_(generator=generator)
        pairs -= sink.numel()
    if pairs:
        sink[:pairs].random_(generator=generator)


def has_normal(generator: torch.Generator) -> bool:
    """Tell whether `generator` keeps the second sample of a pair of normals for the next draw."""
    return cpu_state.read(generator).normal is not None


def drop_normal(generator: torch.Generator) -> None:
    """Use up the cached normal sample, which must be there: no word is drawn."""
    # A draw of one element takes the cached sample, and no word.
    torch.empty(1, dtype=torch.float32, device="cpu").normal_(generator=generator)
