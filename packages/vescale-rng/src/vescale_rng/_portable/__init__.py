"""The portable policy: every number a function of one key and the element's place, on any device.

`SPEC.md` states the map; this package computes it. Read `_run` first: a fill draws one key from the
torch generator (`_key`), cuts the local boxes into tiles (`_tiles`), asks Philox for the blocks
of each tile (`_numpy` on CPU, `_torch` on any device, `_kernel` where Triton is), and turns
words into values (`_maps`, with the elementary functions of `_functions`).

The bits are the same everywhere because every operation on the way is exact or correctly rounded
by IEEE 754: integers, conversions, +, -, *, /, sqrt. No library's log, exp, sin or cos is called,
and no product is fused with a sum.
"""

from vescale_rng._portable.fill_boxes import check, fill, minus_log_
from vescale_rng._portable.key import WORDS, WORDS_ON_CUDA, draw_key
from vescale_rng._portable.sampling import bernoulli_of, permutation, winners
from vescale_rng._portable.truncated import truncated_normal

__all__ = [
    "WORDS",
    "WORDS_ON_CUDA",
    "bernoulli_of",
    "check",
    "draw_key",
    "fill",
    "minus_log_",
    "permutation",
    "truncated_normal",
    "winners",
]
