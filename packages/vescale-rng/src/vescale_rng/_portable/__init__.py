"""The portable policy: every number a function of one key and the element's place, on any device.

`SPEC.md` states the map; this package computes it.

Reading guide:
    fill_boxes: `fill_portable`: one key, tiles, blocks, values. Start here.
    key: the key of an op, the one thing that is drawn from a torch generator.
    tiles: local boxes split into tiles of bounded size.
    maps, functions, scalars: from words to values, with elementary functions of our own.
    arrays: what a map needs of an array library; numpy_arrays (CPU) and torch_arrays (any device)
        provide it, Philox included; philox_rounds has its constants.
    launch, triton_kernel: the same maps as a Triton kernel.
    sampling, truncated_normal: draws that are no distribution of one tensor.

The bits are the same everywhere because every operation on the way is exact or correctly rounded
by IEEE 754: integers, conversions, +, -, *, /, sqrt. No library's log, exp, sin or cos is called,
and no product is fused with a sum.
"""

from vescale_rng._portable.fill_boxes import check, fill_portable, minus_log_
from vescale_rng._portable.key import WORDS, WORDS_ON_CUDA, draw_key
from vescale_rng._portable.sampling import bernoulli_of, permutation, winners
from vescale_rng._portable.truncated_normal import truncated_normal

__all__ = [
    "WORDS",
    "WORDS_ON_CUDA",
    "bernoulli_of",
    "check",
    "draw_key",
    "fill_portable",
    "minus_log_",
    "permutation",
    "truncated_normal",
    "winners",
]
