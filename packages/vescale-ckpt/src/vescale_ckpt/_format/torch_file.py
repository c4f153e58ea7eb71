"""Reads what `torch.save` writes, as data: tensors, and plain values with tensors in them.

A zip archive of a pickle and the bytes of storages, none of them compressed. Nothing becomes larger
than the file: a tensor has no more elements than its storage, and a value that refers to a part of
itself again and again is refused.
"""

import io
import math
import struct
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from vescale_ckpt._format.pickle_data import Name, PickleRefusedError, Table, read_pickle
from vescale_ckpt._tensors.dtypes import STORED_AS, torch_dtype
from vescale_ckpt._untrusted import bytes_of_shape

_DIRECTORY_ENTRY: Final = b"PK\x01\x02"
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_MOST_RECORDS: Final = 1 << 16
# How much larger than its file a value may be, where parts of it are referred to twice.
_MOST_REPEATED: Final = 16
_OWN_SIZE: Final = 100_000

_STORAGES: Final[Mapping[str, torch.dtype]] = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


def require_sizes(sizes: Any) -> tuple[int, ...]:
    """Return sizes that torch can have; raises `PickleRefusedError`."""
    known = type(sizes) is tuple and all(type(n) is int and n >= 0 for n in sizes)
    if not known or bytes_of_shape(sizes, 1) is None:
        raise PickleRefusedError("sizes that no tensor has")
    return tuple(sizes)


DATA: Final[Table] = {
    ("torch", "Size"): Name(require_sizes),
    ("collections", "OrderedDict"): Name(lambda: {}),
    **{("torch", name): torch_dtype(name) for name in STORED_AS},
}
"""Names of plain data, whatever holds it."""


def read_torch_file(content: bytes) -> Any:
    """Return the tensor or plain value that `torch.save` wrote.

    Raises:
        PickleRefusedError: it is damaged, holds something else, or would become larger.
    """
    records = dict(_records(content))
    if bytes(records.get("byteorder", b"little")) != b"little":
        raise PickleRefusedError("it was written on a big-endian machine")

    def storage(words: Any) -> torch.Tensor:
        if type(words) is not tuple or len(words) != 5 or words[0] != "storage":
            raise PickleRefusedError("a storage of no known form")
        _, dtype, key, _, numel = words
        if not isinstance(dtype, torch.dtype) or type(key) is not str or type(numel) is not int:
            raise PickleRefusedError("a storage of no known form")
        data = records.get(f"data/{key}")
        if data is None or len(data) != numel * dtype.itemsize:
            raise PickleRefusedError(f"the bytes of storage {key[:40]!r} are not there")
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        # Copied: a tensor's memory is aligned to its elements, and a record's need not be.
        return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).view(dtype)

    if "data.pkl" not in records:
        raise PickleRefusedError("it holds no pickle")
    value = read_pickle(records["data.pkl"], _TABLE, storage)
    _require_size(value, _MOST_REPEATED * len(content) + _OWN_SIZE)
    return value


def _records(content: bytes) -> Iterator[tuple[str, memoryview]]:
    """The records of an archive by their names below its folder."""
    # Before a list of them is made. In the elements of a tensor this stands by a rare chance.
    if content.count(_DIRECTORY_ENTRY) > _MOST_RECORDS:
        raise PickleRefusedError(f"more than {_MOST_RECORDS} records")
    try:
        found = zipfile.ZipFile(io.BytesIO(content)).infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, OSError) as error:
        raise PickleRefusedError(f"it is no file of torch.save: {error}") from None
    # Taken as they lie there, as torch does: it may be told to write no checksums.
    memory = memoryview(content)
    for one in found:
        if one.compress_type != zipfile.ZIP_STORED or one.compress_size != one.file_size:
            raise PickleRefusedError("a record is compressed")
        begin = one.header_offset
        head = memory[begin : begin + _LOCAL_HEADER.size] if begin >= 0 else memory[:0]
        if len(head) < _LOCAL_HEADER.size:
            raise PickleRefusedError("it was truncated")
        magic, name, extra = _LOCAL_HEADER.unpack(head)
        begin += _LOCAL_HEADER.size + name + extra
        data = memory[begin : begin + one.file_size]
        if magic != b"PK\x03\x04" or len(data) < one.file_size:
            raise PickleRefusedError("it was truncated")
        yield one.filename.partition("/")[2], data


def _rebuild_tensor(
    storage: Any, offset: Any, size: Any, stride: Any, _: Any, __: Any, *more: Any
) -> torch.Tensor:
    """A view of a storage, none of whose elements it has twice."""
    if (
        not isinstance(storage, torch.Tensor)
        or type(offset) is not int
        or type(stride) is not tuple
    ):
        raise PickleRefusedError("a tensor of no known form")
    sizes = require_sizes(size)
    if len(sizes) != len(stride) or any(type(n) is not int or n < 0 for n in (offset, *stride)):
        raise PickleRefusedError("a tensor of no known form")
    if 0 in sizes:
        return torch.empty(sizes, dtype=storage.dtype, device="cpu")
    last = offset + sum((n - 1) * step for n, step in zip(sizes, stride, strict=True))
    if last >= storage.numel() or math.prod(sizes) > storage.numel():
        raise PickleRefusedError(f"a tensor of {sizes} in {storage.numel()} elements")
    return _with_lazy_bits(storage.as_strided(sizes, stride, offset), more)


def _with_lazy_bits(tensor: torch.Tensor, more: tuple[Any, ...]) -> torch.Tensor:
    if not more:
        return tensor
    (bits,) = more
    if type(bits) is not dict or not set(bits) <= {"conj", "neg"}:
        raise PickleRefusedError("a tensor of no known form")
    tensor = tensor.conj() if bits.get("conj") else tensor
    return tensor.neg() if bits.get("neg") else tensor


def _rebuild_of_bytes(
    storage: Any, offset: Any, size: Any, stride: Any, _: Any, __: Any, dtype: Any, *more: Any
) -> torch.Tensor:
    """A tensor of a dtype that has no storages of its own; `offset` is in its elements."""
    if not isinstance(storage, torch.Tensor) or not isinstance(dtype, torch.dtype):
        raise PickleRefusedError("a tensor of no known form")
    if storage.dtype != torch.uint8 or storage.numel() % dtype.itemsize:
        raise PickleRefusedError("a tensor of no known form")
    return _rebuild_tensor(storage.view(dtype), offset, size, stride, None, None, *more)


def _rebuild_parameter(data: Any, _: Any, __: Any) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        raise PickleRefusedError("a parameter that is no tensor")
    return data


_TABLE: Final[Table] = {
    **DATA,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): torch.uint8,
    ("torch._utils", "_rebuild_tensor_v2"): Name(_rebuild_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): Name(_rebuild_of_bytes),
    ("torch._utils", "_rebuild_parameter"): Name(_rebuild_parameter),
}


def _require_size(value: Any, most: int) -> None:
    """Refuse a value that is larger, as a tree, than what is left of `most`."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            most -= one.numel() * one.element_size()
        elif isinstance(one, str | dict | list | tuple):
            most -= len(one)
        # Before its entries are added: of a list in itself there is no end.
        if most < 0:
            raise PickleRefusedError("it refers to a part of itself again and again")
        if isinstance(one, dict):
            waiting += one.keys()
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
