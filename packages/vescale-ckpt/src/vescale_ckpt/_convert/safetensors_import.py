"""Imports Hugging Face's safetensors files as a checkpoint, paged in as they are written."""

import math
import os
from typing import Any

import torch

from vescale_ckpt._convert.safetensors_export import INDEX
from vescale_ckpt._coordination.coordinator import SingleProcess
from vescale_ckpt._errors import CorruptError, FormatError, NotFoundError
from vescale_ckpt._format import strict_json
from vescale_ckpt._format.safetensors import METADATA
from vescale_ckpt._progress import Progress
from vescale_ckpt._save.save import SaveOptions, save_with
from vescale_ckpt._storage.base import read_all
from vescale_ckpt._storage.local import LocalStorage
from vescale_ckpt._storage.resolve import resolve, storage_of
from vescale_ckpt._tensors.dtypes import STORED_AS, torch_dtype

_DTYPES = {
    stored.safetensors: torch_dtype(name)
    for name, stored in STORED_AS.items()
    if stored.per_element == 1 and (stored.safetensors != "U8" or name == "uint8")
}
_MOST_JSON = 100_000_000


def import_safetensors(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    under: str = "",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> int:
    """Save what Hugging Face safetensors files hold as the checkpoint `path`, byte for byte.

    The files are mapped, not loaded: what is written need not fit into memory. For this process
    only: not collective.

    Args:
        source: A safetensors file, or a folder with `model.safetensors.index.json`, or with
            safetensors files whose tensors have different names.
        path: Where the checkpoint shall be.
        under: The key of the dict that the tensors go into; by default the state is that dict.
        overwrite: Replace the checkpoint at `path`.
        progress: Called with (bytes written, bytes to write).

    Returns:
        The number of tensors.

    Raises:
        FormatError: A file breaks the rules of safetensors, or the index does not fit the files.
        CheckpointError: Nothing is there, or saving failed.
    """
    tensors: dict[str, torch.Tensor] = {}
    files, index = _files(resolve(source))
    for file in files:
        for name, tensor in _mapped(file).items():
            if name in tensors:
                raise FormatError(f"{file}: '{name}' is in another file, too")
            tensors[name] = tensor
    if index is not None and set(index) != set(tensors):
        odd = sorted(set(index) ^ set(tensors))[0]
        raise FormatError(f"{source}: the index and the files disagree about '{odd[:80]}'")
    state: dict[str, Any] = {under: tensors} if under else dict(tensors)
    options = SaveOptions(overwrite=overwrite, progress=progress)
    save_with(storage_of(path), SingleProcess(), path, state, options)
    return len(tensors)


def _files(source: str) -> tuple[list[str], dict[str, str] | None]:
    storage = LocalStorage()
    if not storage.exists(source):
        raise NotFoundError(f"there is nothing at {source}")
    if not storage.is_directory(source):
        return [source], None
    names = storage.names_in(source)
    if INDEX not in names:
        found = [f"{source}/{name}" for name in names if name.endswith(".safetensors")]
        if not found:
            raise NotFoundError(f"{source} holds no safetensors files")
        return found, None
    content = read_all(storage, f"{source}/{INDEX}", _MOST_JSON)
    index = strict_json.loads(content, INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise FormatError(f"{source}/{INDEX}: 'weight_map' must be an object")
    for file in weight_map.values():
        # A name of a file beside it, and nothing that leads elsewhere.
        if file not in names:
            raise FormatError(f"{source}/{INDEX}: there is no file {str(file)[:80]!r} beside it")
    return [f"{source}/{file}" for file in sorted(set(weight_map.values()))], weight_map


def _mapped(path: str) -> dict[str, torch.Tensor]:
    size = LocalStorage().size(path)
    if size < 8:
        raise CorruptError(f"{path} has {size} bytes: it was truncated")
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MOST_JSON, size - 8):
            raise CorruptError(f"{path}: a header of {length} bytes in a file of {size}")
        header = strict_json.loads(file.read(length), f"{path}: header")
    if not isinstance(header, dict):
        raise FormatError(f"{path}: its header is not an object")
    header.pop(METADATA, None)
    begin = 8 + length
    # Mapped and private: pages are read when they are written out, and the file cannot be changed
    # by mistake.
    data = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)[begin:]
    placed = sorted((_entry(path, name, entry) for name, entry in header.items()),
                    key=lambda e: e[3])  # fmt: skip
    position, tensors = 0, {}
    described = max((entry[4] for entry in placed), default=0)
    if described != data.numel():
        raise CorruptError(f"{path}: {data.numel()} bytes of data, but {described} are described")
    for name, dtype, shape, start, stop in placed:
        # No holes and no overlaps: bytes of the file that no tensor names would be lost.
        if start != position:
            raise FormatError(f"{path}: '{name[:80]}' starts at {start}, where {position} is due")
        part = data[start:stop]
        # Files of other writers need not be aligned; what is not is copied.
        aligned = (begin + start) % dtype.itemsize == 0
        tensors[name] = (part if aligned else part.clone()).view(dtype).view(shape)
        position = stop
    return tensors


def _entry(path: str, name: str, entry: Any) -> tuple[str, torch.dtype, list[int], int, int]:
    where = f"{path}: '{name[:80]}'"
    if not isinstance(entry, dict):
        raise FormatError(f"{where}: not an object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise FormatError(f"{where}: unknown dtype {dtype!r:.40}")
    shape, span = _sizes(entry.get("shape"), where), _sizes(entry.get("data_offsets"), where)
    if len(span) != 2:
        raise FormatError(f"{where}: data_offsets must be two sizes")
    if span[1] - span[0] != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise FormatError(f"{where}: {span[1] - span[0]} bytes for shape {shape} of {dtype}")
    return name, _DTYPES[dtype], shape, span[0], span[1]


def _sizes(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or any(
        type(n) is not int or not 0 <= n < 1 << 62 for n in value
    ):
        raise FormatError(f"{where}: shape and data_offsets must be lists of sizes")
    return value
