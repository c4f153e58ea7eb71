"""Names of dtypes in the manifest, and the safetensors dtypes as which their bytes are stored."""

from typing import NamedTuple

import torch

from vescale_ckpt._errors import StateError
from vescale_ckpt._untrusted import MOST_DIMS, bytes_of_shape


class StoredAs(NamedTuple):
    """The safetensors dtype of an element, and how many of those make one element."""

    safetensors: str
    itemsize: int
    per_element: int = 1

    @property
    def bytes_per_element(self) -> int:
        return self.itemsize * self.per_element


# Types that not every safetensors release knows are stored as one that all of them do: complex
# numbers as pairs (an extra last dim of 2), exotic 8-bit floats as their bits.
STORED_AS: dict[str, StoredAs] = {
    "bool": StoredAs("BOOL", 1),
    "uint8": StoredAs("U8", 1),
    "uint16": StoredAs("U16", 2),
    "uint32": StoredAs("U32", 4),
    "uint64": StoredAs("U64", 8),
    "int8": StoredAs("I8", 1),
    "int16": StoredAs("I16", 2),
    "int32": StoredAs("I32", 4),
    "int64": StoredAs("I64", 8),
    "float8_e4m3fn": StoredAs("F8_E4M3", 1),
    "float8_e5m2": StoredAs("F8_E5M2", 1),
    "float8_e4m3fnuz": StoredAs("U8", 1),
    "float8_e5m2fnuz": StoredAs("U8", 1),
    "float8_e8m0fnu": StoredAs("U8", 1),
    "float16": StoredAs("F16", 2),
    "bfloat16": StoredAs("BF16", 2),
    "float32": StoredAs("F32", 4),
    "float64": StoredAs("F64", 8),
    "complex32": StoredAs("F16", 2, 2),
    "complex64": StoredAs("F32", 4, 2),
    "complex128": StoredAs("F64", 8, 2),
}


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape, in a safetensors file, of what has that one in the state."""
    parts = STORED_AS[name].per_element
    return (*shape, parts) if parts > 1 else shape


def require_storable(name: str, shape: tuple[int, ...]) -> None:
    """Raise `StateError` for a shape that no reader takes, also of an empty tensor."""
    if bytes_of_shape(stored_shape(name, shape), STORED_AS[name].itemsize) is None:
        raise StateError(
            f"{len(shape)} dims of sizes {shape!s:.200}: at most {MOST_DIMS} dims (one fewer of "
            "complex numbers) and 2^62 bytes can be saved; reshape it"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype, `torch.float32` as "float32"; `StateError` if it has no stored form."""
    name = str(dtype).removeprefix("torch.")
    if name not in STORED_AS:
        raise StateError(
            f"dtype {dtype} has no stored form (quantized and sub-byte types have none)"
        )
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name that `dtype_name` gave."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def converts(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether `cast` may make one of the other: the same kind of number, in which all are there.

    Floating and complex numbers are rounded, and infinite beyond the largest of a narrower dtype;
    integers have to fit, whatever their values are.
    """
    if saved == wanted:
        return True
    if str(wanted).removeprefix("torch.") not in STORED_AS:
        return False
    if saved.is_complex or wanted.is_complex:
        return saved.is_complex and wanted.is_complex
    if saved.is_floating_point or wanted.is_floating_point:
        # Of exponents alone there is neither a sign nor a zero.
        return saved.is_floating_point and wanted.is_floating_point and torch.finfo(wanted).min < 0
    if torch.bool in (saved, wanted):
        return False
    inner, outer = torch.iinfo(saved), torch.iinfo(wanted)
    return bool(outer.min <= inner.min and inner.max <= outer.max)
