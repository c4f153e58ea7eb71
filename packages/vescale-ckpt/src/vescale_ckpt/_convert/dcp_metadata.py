"""The metadata of a DCP checkpoint, read as data and checked: what is stored of it, and where."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from vescale_ckpt._errors import FormatError
from vescale_ckpt._format.pickle_data import Name, PickleRefusedError, Record, Table, read_pickle
from vescale_ckpt._format.torch_file import DATA, require_sizes
from vescale_ckpt._state.values import MAX_DEPTH
from vescale_ckpt._tensors.regions import Region, Shape, first_overlap, whole
from vescale_ckpt._untrusted import bytes_of_shape, require_name

METADATA: Final = ".metadata"
_CHECKPOINT: Final = "torch.distributed.checkpoint"
_MEMORY_FORMATS: Final = frozenset(
    {"TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT"}
)


class StoredBytes(NamedTuple):
    """The bytes of an item: of a file of the folder, from `offset` on."""

    file: str
    offset: int
    length: int


class TensorPlan(NamedTuple):
    """A tensor, and what is stored of it: chunks that cover it, each element once."""

    dtype: torch.dtype
    shape: Shape
    chunks: list[tuple[Region, StoredBytes]]


# By name; a value lies in one item.
Plan = dict[str, TensorPlan | StoredBytes]


def parse_metadata(content: bytes) -> tuple[Plan, Mapping[str, tuple[str | int, ...]]]:
    """Return what is stored under each name, and the way to it where the state was nested.

    Raises:
        FormatError: it is not DCP's metadata, or contradicts itself.
    """
    try:
        metadata = read_pickle(content, _TABLE)
        _require(type(metadata) is Record and metadata.kind == "Metadata", "it is no Metadata")
        entries = _dict_of(metadata.get("state_dict_metadata"), "state_dict_metadata")
        stored = _stored(_dict_of(metadata.get("storage_data"), "storage_data"))
        plan = {
            name: _planned(name, entry, stored.get(name, {})) for name, entry in entries.items()
        }
        _require_disjoint(plan)
        return plan, _paths(metadata.get("planner_data"), plan)
    except ValueError as error:
        raise FormatError(f"{METADATA}: not a metadata file of DCP: {error}") from None


def _require(holds: bool, words: str) -> None:
    if not holds:
        raise ValueError(words)


def _dict_of(value: Any, what: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"{what} is a {type(value).__name__}")
    return value


def _shown(name: str) -> str:
    return f"'{name[:80]}'"


def _stored(data: dict[Any, Any]) -> dict[str, dict[Shape | None, StoredBytes]]:
    """The items by name, and by where they are in their tensor; None for those that say nothing."""
    found: dict[str, dict[Shape | None, StoredBytes]] = {}
    for index, info in data.items():
        known = isinstance(index, Record) and index.kind == "MetadataIndex"
        _require(known and type(index.get("fqn")) is str, "storage_data has an odd key")
        name = index.get("fqn")
        known = isinstance(info, Record) and info.kind == "_StorageInfo"
        _require(known, f"{_shown(name)}: stored in no known way")
        _require(not info.get("transform_descriptors"), f"{_shown(name)}: stored with transforms")
        offset, length = info.get("offset"), info.get("length")
        sizes = all(type(n) is int and 0 <= n < 1 << 62 for n in (offset, length))
        _require(sizes, f"{_shown(name)}: offset and length of its item are no sizes")
        # The name comes from the file: it must not lead out of the folder.
        item = StoredBytes(require_name(info.get("relative_path")), offset, length)
        at = index.get("offset")
        at = at if at is None else require_sizes(at)
        items = found.setdefault(name, {})
        _require(at not in items, f"{_shown(name)}: stored twice at {at}")
        items[at] = item
    return found


def _planned(
    name: Any, entry: Any, items: Mapping[Shape | None, StoredBytes]
) -> TensorPlan | StoredBytes:
    _require(type(name) is str and isinstance(entry, Record), "an entry of no known form")
    where = _shown(name)
    if entry.kind == "BytesStorageMetadata":
        _require(len(items) == 1, f"{where}: stored {len(items)} times")
        return next(iter(items.values()))
    _require(entry.kind == "TensorStorageMetadata", f"{where}: a {entry.kind[:80]} is stored")
    properties, chunks = entry.get("properties"), entry.get("chunks")
    known = isinstance(properties, Record) and type(properties.state) is tuple
    dtype = properties.state[0] if known and properties.state else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{where}: it has no dtype")
    shape = require_sizes(entry.get("size"))
    _require(
        bytes_of_shape(shape, dtype.itemsize) is not None,
        f"{where}: {shape} is too large to be real",
    )
    _require(type(chunks) is list, f"{where}: its chunks are no list")
    found = [one for chunk in chunks for one in _chunk(where, chunk, shape, dtype, items)]
    clash = first_overlap([region for region, _ in found])
    _require(clash is None, f"{where}: its chunks {clash} overlap")
    filled, due = sum(region.numel for region, _ in found), whole(shape).numel
    _require(filled == due, f"{where}: {filled} of {due} elements are stored")
    return TensorPlan(dtype, shape, found)


def _chunk(
    where: str,
    chunk: Any,
    shape: Shape,
    dtype: torch.dtype,
    items: Mapping[Shape | None, StoredBytes],
) -> Iterator[tuple[Region, StoredBytes]]:
    known = isinstance(chunk, Record) and chunk.kind == "ChunkStorageMetadata"
    _require(known, f"{where}: a chunk of no known form")
    region = Region(require_sizes(chunk.get("offsets")), require_sizes(chunk.get("sizes")))
    _require(
        len(region.offset) == len(region.shape) == len(shape)
        and all(o + n <= size for o, n, size in zip(*region, shape, strict=True)),
        f"{where}: a chunk {region.offset} + {region.shape} outside of the shape {shape}",
    )
    if not region.numel:
        return
    # A tensor that was not sharded may be stored under no offset.
    item = items.get(region.offset, items.get(None))
    if item is None:
        raise ValueError(f"{where}: nothing is stored for the chunk at {region.offset}")
    # Nothing is compressed: before memory is taken it is known that as much is in the files.
    _require(
        item.length >= region.numel * dtype.itemsize,
        f"{where}: {item.length} bytes for the chunk at {region.offset}",
    )
    yield region, item


def _require_disjoint(plan: Plan) -> None:
    """Each byte is of one item: else a small file would become a state of any size."""
    every = [
        item
        for one in plan.values()
        for item in ([one] if isinstance(one, StoredBytes) else [item for _, item in one.chunks])
    ]
    end = ("", 0)
    for item in sorted(every):
        _require(
            item.file != end[0] or item.offset >= end[1],
            f"byte {item.offset} of {item.file[:80]!r} belongs to two items",
        )
        end = (item.file, item.offset + item.length)


def _paths(paths: Any, plan: Plan) -> Mapping[str, tuple[str | int, ...]]:
    """The way to every leaf, by its name; planners that nest nothing have none."""
    if type(paths) is not dict:
        return {}
    for name, path in paths.items():
        known = type(path) is tuple and 0 < len(path) <= MAX_DEPTH
        _require(
            name not in plan or (known and all(type(step) in (str, int) for step in path)),
            f"the way to {str(name)[:80]!r} is none",
        )
    return {name: path for name, path in paths.items() if name in plan}


def _record(module: str, kind: str) -> tuple[tuple[str, str], Name]:
    return (f"{_CHECKPOINT}.{module}", kind), Name(kind=kind)


def _memory_format(found: Any, name: Any = "TORCH_CONTIGUOUS_FORMAT") -> None:
    """How the memory was laid out: of a member of DCP's enum, no other attribute of anything."""
    known = type(name) is str and name in _MEMORY_FORMATS
    if not known or not (found is _ENCODING or type(found) is int):
        raise PickleRefusedError(f"it asks for an attribute {str(name)[:80]!r}, which is not data")


_ENCODING: Final = Name(_memory_format)

# What a .metadata file of torch 2.x names; everything else is refused.
_TABLE: Final[Table] = {
    **DATA,
    **dict(
        _record("metadata", kind)
        for kind in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
        )
    ),
    **dict([_record("filesystem", "_StorageInfo")]),
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"): _ENCODING,
    # So Python 3.11.0 to 3.11.3 pickles a member of an enum.
    ("builtins", "getattr"): Name(_memory_format),
    ("torch.serialization", "_get_layout"): Name(lambda layout: None),
    # Where it was saved to, which nobody asks for.
    **{
        (module, name): Name(lambda *parts: None)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
