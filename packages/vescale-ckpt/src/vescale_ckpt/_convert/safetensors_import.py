"""Imports Hugging Face's safetensors files as a checkpoint, paged in as they are written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vescale_ckpt._coordination.coordinator import SingleProcess
from vescale_ckpt._errors import CorruptError, FormatError, NotFoundError, StorageError
from vescale_ckpt._progress import Progress
from vescale_ckpt._save.save import SaveOptions, save_with
from vescale_ckpt._storage.base import read_all
from vescale_ckpt._storage.local import LocalStorage
from vescale_ckpt._storage.resolve import resolve, storage_of
from vescale_ckpt._untrusted import (
    DTYPES,
    INDEX,
    MOST_HEADER,
    TruncatedError,
    open_regular,
    parse_index,
    read_header,
)


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
        CorruptError: A file is too short or too long.
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
    try:
        weight_map = parse_index(read_all(storage, f"{source}/{INDEX}", MOST_HEADER))
    except ValueError as error:
        raise FormatError(f"{source}/{INDEX}: {error}") from None
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if file not in names]
    if absent:
        raise FormatError(f"{source}/{INDEX}: there is no file {absent[0]!r} beside it")
    return [f"{source}/{file}" for file in files], weight_map


def _mapped(path: str) -> dict[str, torch.Tensor]:
    with _file_errors(path), open_regular(path) as file:
        header, begin = read_header(file)
        size = os.fstat(file.fileno()).st_size
    # Mapped and private: pages are read when they are written out, and the file cannot be changed
    # by mistake.
    data = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)[begin:]
    tensors = {}
    for name, (kind, shape, start, stop) in header.items():
        dtype, part = DTYPES[kind], data[start:stop]
        # Files of other writers need not be aligned; what is not is copied.
        aligned = (begin + start) % dtype.itemsize == 0
        tensors[name] = (part if aligned else part.clone()).view(dtype).view(shape)
    return tensors


@contextmanager
def _file_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    except TruncatedError as error:
        raise CorruptError(f"{path}: {error}") from None
    except ValueError as error:
        raise FormatError(f"{path} is no safetensors file: {error}") from None
