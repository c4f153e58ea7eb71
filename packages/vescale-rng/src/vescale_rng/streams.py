"""Generators as streams: where they stand, and how far ops move them.

`vescale_rng.get_state` and `set_state` save and restore them, `check_in_step` compares ranks.
"""

from vescale_rng._cpu.generator_state import Position
from vescale_rng._cpu.stream_ops import BernoulliOf, Dropout, Multinomial, RandPerm
from vescale_rng._state.fingerprint import fingerprint
from vescale_rng._state.positions import advance, at, draws, position, seek, skip

__all__ = [
    "BernoulliOf",
    "Dropout",
    "Multinomial",
    "Position",
    "RandPerm",
    "advance",
    "at",
    "draws",
    "fingerprint",
    "position",
    "seek",
    "skip",
]
