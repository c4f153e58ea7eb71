"""Reads what anybody may have written: regular files, JSON, headers and indices of safetensors.

Nothing here trusts its input, allocates what a file only claims, or raises anything but `OSError`
and `ValueError`, whose words say what was found. The packages that read such files have this file
each, the same to the last byte.
"""

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Final, NamedTuple

import torch

MOST_DIMS: Final = 64
"""As torch allows."""

MOST_BYTES: Final = 1 << 62
"""Of a tensor. Sums of two stay below 2^63: no size overflows where it meets a 64-bit integer."""

MOST_HEADER: Final = 100_000_000
"""Bytes of a header or an index: the bound of safetensors itself."""

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""Dtypes by their names in safetensors, those that its own reader for torch has, too."""

METADATA: Final = "__metadata__"
INDEX: Final = "model.safetensors.index.json"

_SPACE = re.compile(r"[ \t\n\r]*")
_KIND = re.compile(r'"([A-Z0-9_]{1,20})"')
# A size has no sign, no zeros in front, no fraction: 19 digits hold every one below 2^63.
_SIZE = r"(?:0|[1-9][0-9]{0,18})"
# One more than there may be: those are refused in words of their own, and longer ones are not read.
_SIZES = re.compile(
    rf"\[[ \t\n\r]*((?:{_SIZE}[ \t\n\r]*(?:,[ \t\n\r]*{_SIZE}[ \t\n\r]*){{0,{MOST_DIMS}}})?)\]"
)
_STRING = json.JSONDecoder()


class TruncatedError(ValueError):
    """A file has not as many bytes as it says."""


class Entry(NamedTuple):
    """A tensor of a safetensors file; bytes count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file that can be read to its end: no pipe, no device, no folder.

    Symbolic links are followed: folders of downloads are made of them.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is something else.
    """
    # A pipe would wait for somebody to write into it when it is opened.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{os.fspath(path)} is not a regular file")
        return open(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def require_name(name: object) -> str:
    """Return the name of a file in a folder; it does not lead anywhere else.

    Raises:
        ValueError: it has a separator, is none, or no file system can hold it.
    """
    if (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or len(name) > 255
        or not name.isprintable()
        or any(mark in name for mark in ("/", "\\", ":"))
    ):
        raise ValueError(f"{name!r:.80} is no name of a file beside it")
    return name


def read_small(path: str | os.PathLike[str], at_most: int) -> bytes:
    """Read a whole regular file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, or larger than `at_most` bytes.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > at_most:
            raise ValueError(f"{size} bytes; at most {at_most} make sense")
        return read_exactly(file, size)


def read_exactly(file: BinaryIO, size: int) -> bytes:
    """Read so many bytes, whose number is known to be in the file.

    Raises:
        TruncatedError: it ends before.
    """
    parts = []
    while size and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    if size:
        raise TruncatedError(f"it ends {size} bytes too soon: it was truncated")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def parse_json(data: bytes | str) -> Any:
    """Parse JSON as the standard has it: no key twice, no NaN, no bottomless nesting.

    Raises:
        ValueError: it is none.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        found = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        if "\\u" in text:  # halves of characters, which no file name or other text can hold
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        # Python's parser recurses; it stops by itself, well before the stack is used up.
        raise ValueError("nested too deeply") from None
    return found


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Two readers could each use another one of two equal keys.
    found = dict(pairs)
    if len(found) < len(pairs):
        # Counted in one pass: the search must stay cheap for a million keys.
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {twice[:80]!r} appears twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def read_header(file: BinaryIO) -> tuple[dict[str, Entry], int]:
    """Read the header of a safetensors file: its tensors, in the order of their bytes, and its end.

    Raises:
        ValueError: it breaks a rule of safetensors, or the file is not all there.
    """
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise TruncatedError(f"it has {size} bytes: it was truncated")
    length = int.from_bytes(read_exactly(file, 8), "little")
    # Before it is read: a damaged length would ask for as much memory.
    if not 2 <= length <= min(size - 8, MOST_HEADER):
        raise TruncatedError(f"a header of {length} bytes in a file of {size}")
    entries = parse_header(read_exactly(file, length))
    return require_tiling(entries, size - 8 - length), 8 + length


def require_tiling(entries: Mapping[str, Entry], size: int) -> dict[str, Entry]:
    """Return entries in the order of their bytes; `size` bytes have to be theirs, each once.

    Raises:
        ValueError: bytes belong to two tensors, or to none.
    """
    described = max((one.end for one in entries.values()), default=0)
    if described != size:
        raise TruncatedError(f"{size} bytes of data, but {described} are described")
    position = 0
    # By their ends as well: empty tensors begin where the next one does.
    ordered = sorted(entries.items(), key=lambda item: item[1][2:])
    for name, one in ordered:
        if one.begin != position:
            raise ValueError(f"'{name[:80]}' starts at byte {one.begin}, where {position} is due")
        position = one.end
    return dict(ordered)


def parse_header(data: bytes) -> dict[str, Entry]:
    """Parse a header. Only what a header may hold is ever made of it.

    Raises:
        ValueError: it breaks a rule of safetensors.
    """
    if data[:1] != b"{":
        raise ValueError("its header does not begin with an object")
    cursor = _Cursor(data.decode("utf-8"))
    found: dict[str, Entry] = {}
    seen_metadata = False
    for name in cursor.members():
        if name == METADATA:
            if seen_metadata:
                raise ValueError(f"key {name!r} appears twice")
            seen_metadata = True
            _skip_metadata(cursor)
            continue
        if name in found:
            raise ValueError(f"key {name[:80]!r} appears twice")
        found[name] = _entry(cursor, name)
    if cursor.skip() != len(cursor.text):
        raise ValueError("its header goes on behind its object")
    return found


def _skip_metadata(cursor: "_Cursor") -> None:
    keys = set()
    for key in cursor.members():
        if key in keys:
            raise ValueError(f"key {key[:80]!r} of {METADATA} appears twice")
        keys.add(key)
        cursor.string()


def _entry(cursor: "_Cursor", name: str) -> Entry:
    where = f"'{name[:80]}'"
    dtype, sizes = None, {}
    for key in cursor.members():
        if (dtype is not None) if key == "dtype" else (key in sizes):
            raise ValueError(f"{where}: key {key!r} appears twice")
        if key == "dtype":
            dtype = cursor.match(_KIND, f"{where}: dtype must be a name")[1]
        elif key in ("shape", "data_offsets"):
            words = f"{where}: shape and data_offsets must be lists of sizes"
            text = cursor.match(_SIZES, words)[1]
            # Before any number is made of them.
            if text.count(",") >= MOST_DIMS:
                raise ValueError(f"{where}: more than {MOST_DIMS} dims")
            sizes[key] = tuple(map(int, text.split(","))) if text else ()
        else:
            raise ValueError(f"{where}: {key[:80]!r} is nothing that a tensor has")
    if dtype is None or len(sizes) != 2:
        raise ValueError(f"{where}: it must have dtype, shape and data_offsets")
    if dtype not in DTYPES:
        raise ValueError(f"{where}: unknown dtype {dtype!r}, which torch lacks")
    shape, span = sizes["shape"], sizes["data_offsets"]
    nbytes = bytes_of_shape(shape, DTYPES[dtype].itemsize)
    if nbytes is None:
        raise ValueError(f"{where}: shape {shape} is too large to be real")
    if len(span) != 2:
        raise ValueError(f"{where}: data_offsets must be two sizes")
    if span[1] - span[0] != nbytes:
        raise ValueError(f"{where}: {span[1] - span[0]} bytes for shape {shape} of {dtype}")
    return Entry(dtype, shape, *span)


def bytes_of_shape(shape: Iterable[int], itemsize: int) -> int | None:
    """Return the bytes of a tensor; None where no tensor of torch has such a shape."""
    sizes = tuple(shape)
    if len(sizes) > MOST_DIMS:
        return None
    # Also of empty ones: torch computes with the products of the other dims.
    elements = math.prod(n for n in sizes if n)
    if elements * (1 if 0 in sizes else itemsize) > MOST_BYTES:
        return None
    return math.prod(sizes) * itemsize


def parse_index(data: bytes) -> dict[str, str]:
    """Return which file has which tensor, by an index that lies beside the files.

    Raises:
        ValueError: it is no index, names no tensor, or leads out of the folder.
    """
    index = parse_json(data)
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files:
        raise ValueError("'weight_map' must be an object that names tensors")
    for file in files.values():
        require_name(file)
    return files


class _Cursor:
    """A place in the text of a header. What stands there is checked before anything is made."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def skip(self) -> int:
        """Go behind white space."""
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        return self.at

    def match(self, pattern: re.Pattern[str], words: str) -> re.Match[str]:
        """Take what matches; raise `words` where nothing does."""
        found = pattern.match(self.text, self.skip())
        if found is None:
            raise ValueError(f"{words}, not {self.text[self.at : self.at + 40]!r}")
        self.at = found.end()
        return found

    def take(self, mark: str) -> bool:
        """Take a mark; whether it was there."""
        found = self.text.startswith(mark, self.skip())
        self.at += len(mark) * found
        return found

    def string(self) -> str:
        """Take a string."""
        # Anything else than a string would be made whole before it is refused.
        if not self.text.startswith('"', self.skip()):
            raise ValueError(self._unexpected("a string"))
        try:
            found, self.at = _STRING.raw_decode(self.text, self.at)
        except ValueError as error:
            raise ValueError(f"not the JSON that a header is: {error}") from None
        found.encode("utf-8")  # halves of characters are no text
        return str(found)

    def members(self) -> Iterator[str]:
        """Take an object: its keys, one by one; the caller takes each value."""
        if not self.take("{"):
            raise ValueError(self._unexpected("an object"))
        if self.take("}"):
            return
        while True:
            key = self.string()
            if not self.take(":"):
                raise ValueError(self._unexpected("':'"))
            yield key
            if self.take("}"):
                return
            if not self.take(","):
                raise ValueError(self._unexpected("',' or '}'"))

    def _unexpected(self, due: str) -> str:
        return f"not the JSON that a header is: {due} is due at character {self.at}"
