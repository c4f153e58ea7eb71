"""One rank's part of a save: its data file, and what the manifest must say about it."""

from typing import Any

import torch

from vescale_ckpt import _checksum
from vescale_ckpt._boxes import intersect
from vescale_ckpt._dtypes import dtype_name
from vescale_ckpt._errors import StateError, as_checkpoint_error
from vescale_ckpt._flatten import Flat
from vescale_ckpt._layout import Box, Layout, box_view, local_and_layout, narrowed, region_of
from vescale_ckpt._plan import Held, Offers, Piece, SavePlan, TensorOffer
from vescale_ckpt._progress import Progress
from vescale_ckpt._safetensors import (
    bytes_of,
    encode_header,
    entry_name,
    header_entry,
    in_file_order,
)
from vescale_ckpt._storage import Storage

# Copies of plain tensors up to this size are compared: it covers RNG states, steps, buffers.
COMPARED_BYTES = 1 << 20


class Sources:
    """The tensors of one rank: what it can offer, and the data of any region that it holds."""

    def __init__(self, flat: Flat) -> None:
        self._held: dict[str, tuple[torch.Tensor, Layout]] = {}
        self._private = flat.private
        for name, tensor in flat.tensors.items():
            try:
                self._held[name] = local_and_layout(tensor)
            except Exception as error:
                # Also what the tensor's own class raises, such as for a pending sum.
                raise StateError(f"at '{name}': {as_checkpoint_error(error)}") from error
            # Saved for one rank only, its other parts would be lost.
            if name in self._private and self._held[name][1].declared:
                raise StateError(f"at '{name}': a sharded tensor inside a RankLocal: take it out")

    def offers(self, *, compare: bool) -> Offers:
        """What this rank holds; with digests of small plain tensors if copies are compared."""
        return {name: self._offer(name, compare) for name in self._held}

    def _offer(self, name: str, compare: bool) -> TensorOffer:
        local, layout = self._held[name]
        # Only where copies are presumed: comparing costs a copy from the device and a checksum.
        small = local.numel() * local.element_size() <= COMPARED_BYTES
        digested = compare and small and not layout.declared and name not in self._private
        held = tuple(
            Held(region_of(box), _digest(local, box) if digested else None) for box in layout.boxes
        )
        try:
            return TensorOffer(dtype_name(local.dtype), layout.global_shape, held)
        except StateError as error:
            raise StateError(f"at '{name}': {error}") from None

    def data(self, piece: Piece) -> memoryview:
        """The bytes of a region that lies in one of this rank's boxes."""
        local, layout = self._held[piece.name]
        box = next(b for b in layout.boxes if intersect(region_of(b), piece.region) == piece.region)
        return bytes_of(narrowed(box_view(local, box), region_of(box), piece.region))


def write_data(
    storage: Storage, directory: str, rank: int, plan: SavePlan, sources: Sources, tell: Progress
) -> dict[str, Any] | None:
    """Write this rank's pieces into its file. Returns records for the manifest, as JSON."""
    pieces = in_file_order(list(plan.pieces[rank]))
    if not pieces:
        return None
    # The header comes first in the file: all sizes are known before any data is looked at.
    entries, begin = {}, 0
    for piece in pieces:
        name = entry_name(piece.name, piece.region, plan.tensors[piece.name][1])
        entries[name] = header_entry(piece, begin)
        begin += piece.nbytes
    header = encode_header(entries)
    file_name = f"r{rank:05d}.safetensors"
    chunks = _write_file(storage, f"{directory}/{file_name}", header, pieces, sources, tell)
    return {
        "file": file_name,
        "bytes": len(header) + begin,
        "header_bytes": len(header),
        "header_crc32": _checksum.of_block(header),
        "chunks": chunks,
    }


def _write_file(
    storage: Storage,
    path: str,
    header: bytes,
    pieces: list[Piece],
    sources: Sources,
    tell: Progress,
) -> list[list[Any]]:
    """Returns [tensor name, offset, shape, start, bytes, checksums] of every piece."""
    total = sum(piece.nbytes for piece in pieces)
    position, chunks = len(header), []
    writer = storage.create(path)
    try:
        writer.write(memoryview(header))
        for piece in pieces:
            # One piece at a time: where a copy is needed (from a device, or of strided memory),
            # the peak is one piece, not the whole state.
            data = sources.data(piece)
            checksums = _checksum.of_blocks(data)
            writer.write(data)
            region = piece.region
            chunks.append(
                [piece.name, region.offset, region.shape, position, piece.nbytes, checksums]
            )
            position += piece.nbytes
            tell(position - len(header), total)
        writer.finish()
    finally:
        writer.abandon()
    return chunks


def _digest(local: torch.Tensor, box: Box) -> int:
    return int(_checksum.of_block(bytes_of(box_view(local, box))), 16)
