"""Generators as streams: where they stand, how far ops move them, saving and comparing them.

The same names are in `vescale_rng`.
"""

from vescale_rng._cpu.generator_state import Position
from vescale_rng._cpu.stream_ops import BernoulliOf, Dropout, Multinomial, RandPerm
from vescale_rng._state.agreement import check_in_step
from vescale_rng._state.fingerprint import fingerprint
from vescale_rng._state.json_state import get_state, set_state
from vescale_rng._state.positions import advance, at, draws, position, seek, skip

__all__ = [
    "BernoulliOf",
    "Dropout",
    "Multinomial",
    "Position",
    "RandPerm",
    "advance",
    "at",
    "check_in_step",
    "draws",
    "fingerprint",
    "get_state",
    "position",
    "seek",
    "set_state",
    "skip",
]
