"""Layouts of every kind, and a storage that counts what is read of it."""

import itertools
import math

from emulated_ranks import cut, piece_of, sharded
from vescale_ckpt._storage.local import LocalStorage


def layouts(whole, ranks, **how):
    """Name -> one piece per rank: the layouts that a mesh makes, and those that only we have."""
    rows, columns = whole.shape
    # Three blocks of rows, each cut over the ranks.
    interleaved = [
        [
            ((base + start, 0), (n, columns))
            for base, size in cut(rows, 3)
            for start, n in [cut(size, ranks)[rank]]
        ]
        for rank in range(ranks)
    ]
    found = {
        "rows": sharded(whole, ranks, 0, **how),
        "columns": sharded(whole, ranks, 1, **how),
        "interleaved": [held(whole, regions, **how) for regions in interleaved],
        "ragged": ragged(whole, ranks, **how),
    }
    if ranks % 2 == 0:
        grid = itertools.product(cut(rows, ranks // 2), cut(columns, 2))
        found["both dims"] = [
            held(whole, [((r, c), (height, width))], **how) for (r, height), (c, width) in grid
        ]
    return found


def held(whole, regions, **how):
    """A piece of those regions that are not empty."""
    return piece_of(whole, [region for region in regions if math.prod(region[1])], **how)


def ragged(whole, ranks, **how):
    """Flat runs of elements of unequal length, as boxes: a row's end, full rows, a row's start."""
    rows, columns = whole.shape
    ends = [whole.numel() * (i * i) // (ranks * ranks) for i in range(ranks + 1)]
    pieces = []
    for begin, end in itertools.pairwise(ends):
        regions, at = [], begin
        while at < end:
            row, column = divmod(at, columns)
            full = (end - at) // columns if column == 0 else 0
            if full:
                regions.append(((row, 0), (full, columns)))
                at += full * columns
            else:
                n = min(columns - column, end - at)
                regions.append(((row, column), (1, n)))
                at += n
        pieces.append(piece_of(whole, regions, **how))
    assert rows * columns == ends[-1]
    return pieces


class CountingStorage(LocalStorage):
    """Counts the bytes that are read from data files."""

    def __init__(self):
        self.bytes = 0

    def open(self, path):
        reader, storage = super().open(path), self
        if not path.endswith(".safetensors"):
            return reader

        class Counting:
            def read_into(self, offset, buffer):
                storage.bytes += buffer.nbytes
                reader.read_into(offset, buffer)

            def close(self):
                reader.close()

        return Counting()
