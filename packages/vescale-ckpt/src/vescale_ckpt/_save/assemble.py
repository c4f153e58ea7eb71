"""Puts a manifest together from what the ranks have written."""

import itertools
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from vescale_ckpt._format.checksums import Checksum
from vescale_ckpt._format.manifest import Chunk, FileRecord, Manifest, TensorRecord
from vescale_ckpt._state.values import Node
from vescale_ckpt._tensors.regions import Region, Shape
from vescale_ckpt._version import __version__


def assembled(
    tensors: Mapping[str, tuple[str, Shape]],
    written: Sequence[Sequence[dict[str, Any]]],
    tree: Node,
    checksum: Checksum,
    *,
    world_size: int,
    notes: Mapping[str, Any] | None = None,
) -> Manifest:
    """Return the manifest of a save.

    Args:
        tensors: dtype and global shape of each tensor, by name.
        written: of each rank, in order, the records that `write_data` returned.
        tree: the saved state.
        checksum: what the files are under.
        world_size: how many ranks saved.
        notes: more for the provenance.
    """
    files: dict[str, FileRecord] = {}
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    # In rank order, and chunks sorted by region: the manifest does not depend on timing.
    for record in itertools.chain.from_iterable(written):
        file = record["file"]
        files[file] = FileRecord(record["bytes"], record["header_bytes"], record["header_checksum"])
        for name, offset, shape, start, nbytes, digits in record["chunks"]:
            region = Region(tuple(offset), tuple(shape))
            chunks[name].append(Chunk(region, file, start, nbytes, digits))
    records = {
        name: TensorRecord(dtype, shape, tuple(sorted(chunks[name], key=lambda c: c.region)))
        for name, (dtype, shape) in tensors.items()
    }
    return Manifest(files, records, tree, {**_provenance(world_size), **(notes or {})}, checksum)


def _provenance(world_size: int) -> dict[str, Any]:
    return {
        "writer": f"vescale-ckpt {__version__}",
        "torch": str(torch.__version__),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "world_size": world_size,
    }
