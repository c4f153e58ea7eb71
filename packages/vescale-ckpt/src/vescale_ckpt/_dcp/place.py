"""Describes to every rank where and how it writes a save, as the coordinator decides."""

from typing import NamedTuple

from vescale_ckpt._save.commit import SaveLocation


class Place(NamedTuple):
    """Where one rank writes, and how. It is pickled by DCP, so it holds plain values only."""

    location: SaveLocation
    rank: int
    checksum: str
