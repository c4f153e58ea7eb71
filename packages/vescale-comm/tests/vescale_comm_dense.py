"""The collectives on one process: from the list of all members' inputs to that of their outputs.

Written with plain torch operators, so that torch's own autograd differentiates them.
"""

from functools import reduce

import torch

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [getattr(torch, f"int{bits}") for bits in (64, 32, 16, 8)]
INTEGERS += [getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)]
DTYPES = [*FLOATS, *FLOAT8, *COMPLEX, *INTEGERS, torch.bool]

FOLDS = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def all_reduce(xs, *, op="sum"):
    total = reduce(FOLDS[op], xs)
    return [total / len(xs) if op == "avg" else total] * len(xs)


def all_gather(xs, *, dim=0):
    return [torch.cat(xs, dim)] * len(xs)


def reduce_scatter(xs, *, dim=0, sizes, op="sum"):
    return list(torch.split(all_reduce(xs, op=op)[0], sizes, dim))


def all_to_all(xs):
    """`xs[i][j]` goes from i to j."""
    return [list(row) for row in zip(*xs, strict=True)]


def broadcast(xs, *, source):
    return [xs[source]] * len(xs)


def chunks(extent, count):
    """The extents into which torch.chunk cuts, the empty ones included."""
    each = -(-extent // count)
    return [max(0, min(each, extent - index * each)) for index in range(count)]
