"""Real text as bytes: where it comes from, what is for validation, which windows a step sees.

All of it depends on the paths, the seed and the step only, never on the mesh or the rank: every
rank computes the same global batch and the tensor layer keeps its part.
"""

import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from vescale_parallel._errors import TrainError

HELD_OUT: Final = 0.05
"""The part of all bytes that is kept for validation."""

_SKIPPED_FOLDERS: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "_bundled"}
)


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, split once.

    Attributes:
        train: uint8 [n], what steps sample from.
        validation: uint8 [m], never sampled from.
        files: how many files it was read from.
        source: where it comes from, in words.
        checksum: CRC-32 of all bytes, to recognise the same data in another run.
    """

    train: Tensor
    validation: Tensor
    files: int
    source: str
    checksum: int


def load_corpus(paths: Sequence[str], context: int) -> Corpus:
    """Read the files, or the standard library where no path is given, and hold out the tail.

    Files are joined in an order that mixes folders (by a checksum of the name), so that the tail
    is a sample of all of them.

    Raises:
        TrainError: a path does not exist, holds no files, or all of it is too short.
    """
    named = _named_files(paths) if paths else _standard_library()
    source = ", ".join(paths) if paths else "the Python standard library"
    # The checksum shuffles, the name settles ties: the same order on every machine.
    ordered = sorted(named, key=lambda one: (zlib.crc32(one[0].encode()), one[0]))
    joined = bytearray(b"\n".join(path.read_bytes() for _, path in ordered))
    # Also a short text must have one complete sequence to validate on.
    held_out = max(int(len(joined) * HELD_OUT), context + 1)
    if len(joined) < held_out + context + 1:
        raise TrainError(
            f"the data ({source}) has {len(joined)} bytes, and {2 * (context + 1)} are the least "
            f"that sequences of {context} tokens need. Give more --data, or a smaller --context."
        )
    # Of a bytearray, as torch warns of memory that cannot be written to.
    everything = torch.frombuffer(joined, dtype=torch.uint8)
    train, validation = everything[:-held_out], everything[-held_out:]
    return Corpus(train, validation, len(ordered), source, zlib.crc32(joined))


def _named_files(paths: Sequence[str]) -> list[tuple[str, Path]]:
    """Return every file under the paths, with the name that decides its place in the order."""
    found: list[tuple[str, Path]] = []
    for text in paths:
        root = Path(text).expanduser()
        if not root.exists():
            raise TrainError(f"--data {text}: no such file or folder.")
        inside = [root] if root.is_file() else _walk(root)
        if not inside:
            raise TrainError(f"--data {text}: the folder holds no files.")
        found += [(str(path.relative_to(root.parent)), path) for path in inside]
    return found


def _walk(root: Path) -> list[Path]:
    """Files at any depth, without hidden ones."""
    return [
        path
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(root).parts)
    ]


def _standard_library() -> list[tuple[str, Path]]:
    """Return the `.py` files that came with this Python, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        (str(path.relative_to(root)), path)
        for path in sorted(root.rglob("*.py"))
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    ]
    if not files:
        raise TrainError(f"no standard library sources under {root}; give --data PATH.")
    return files


def training_batch(
    corpus: Corpus, *, batch: int, context: int, seed: int, step: int
) -> tuple[Tensor, Tensor]:
    """Return the tokens and targets of a step, each int64 [batch, context].

    A generator of its own, seeded by (seed, step), makes the position in the data a plain number:
    a resumed run needs nothing but the step.
    """
    # Not the global generator: its numbers belong to dropout, and their order must not depend on
    # how batches are made.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    # Exclusive for `randint`: a window is one byte longer than `context`, for its last target.
    last = len(corpus.train) - context
    starts = torch.randint(last, (batch,), generator=generator, device="cpu")
    return _windows(corpus.train, starts.tolist(), context)


def validation_batches(
    corpus: Corpus, *, batch: int, context: int, batches: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Up to `batches` batches of consecutive held-out text, the same ones every time."""
    windows = (len(corpus.validation) - 1) // context
    starts = [window * context for window in range(min(windows, batch * batches))]
    for first in range(0, len(starts), batch):
        yield _windows(corpus.validation, starts[first : first + batch], context)


def _windows(text: Tensor, starts: Sequence[int], context: int) -> tuple[Tensor, Tensor]:
    windows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
