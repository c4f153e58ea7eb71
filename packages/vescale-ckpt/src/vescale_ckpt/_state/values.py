"""Marks that a user puts into a state, and the JSON form of the plain values in it."""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vescale_ckpt._errors import StateError

# A node of the saved tree, ready for JSON. See FORMAT.md.
Node = Any

MAX_DEPTH: Final = 64
MAX_INT_BITS: Final = 8192

# What a rank-local value becomes when the number of ranks has changed:
# (values of all saving ranks, this rank, number of ranks now) -> this rank's value.
Reshard = Callable[[list[Any], int, int], Any]


@dataclass
class RankLocal:
    """State that each rank keeps for itself, such as the position of its data loader.

    Every rank's value is saved. Loading on as many ranks gives each its own back. On another
    number of ranks `reshard(values, rank, world_size)` of the object in `into` decides; without
    one that is a `MismatchError`.

    Examples:
        >>> RankLocal({"position": 3}).value
        {'position': 3}
    """

    value: Any
    reshard: Reshard | None = None


@dataclass
class Replicated:
    """State of which every rank holds a copy: one of them is saved.

    With `check`, tensors of any size are compared when they are saved, and the ranks that differ
    from most are named in a `StateError`; without, not even small ones are. Plain values are
    always compared.

    Examples:
        >>> Replicated({"epoch": 3}).check
        True
    """

    value: Any
    check: bool = True


@dataclass(frozen=True)
class PerRank:
    """What `read` gives for a `RankLocal`: the values of all ranks that saved, in rank order."""

    values: tuple[Any, ...]


class Whole:
    """The type of `WHOLE`."""

    def __repr__(self) -> str:
        return "WHOLE"


# In `into`: whatever the checkpoint holds here, as full tensors on the CPU.
WHOLE: Final = Whole()


def kind_of(node: Node) -> str:
    """Tell what a node is: "list", "value" for any JSON scalar, or its tag, such as "dict"."""
    if isinstance(node, list):
        return "list"
    return next(iter(node)) if isinstance(node, dict) else "value"


def encode_value(value: object) -> Node:
    """Encode a plain value as JSON; raises `StateError` for any other Python object."""
    # Exact types only: a subclass (an enum, a numpy scalar) would come back as something else.
    kind = type(value)
    if value is None or kind in (bool, str):
        return _valid_text(value) if isinstance(value, str) else value
    if isinstance(value, int) and kind is int:
        if value.bit_length() > MAX_INT_BITS:
            raise StateError(f"an integer of {value.bit_length()} bits; at most {MAX_INT_BITS}")
        # JSON readers are free to round large integers to a float: these go as hexadecimal.
        return value if value.bit_length() <= 53 else {"int": hex(value)}
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    raise StateError(f"a {kind.__module__}.{kind.__qualname__} cannot be saved: {_advice(value)}")


def decode_float(bits: str) -> float:
    """Decode a float of 16 hexadecimal digits, most significant first: exact for nan and inf."""
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return value


def _valid_text(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise StateError(f"a string that is not valid Unicode: {error.reason}") from None
    return text


def _advice(value: object) -> str:
    kind = type(value)
    if kind.__module__.startswith("numpy"):
        is_array = getattr(value, "ndim", 0) > 0
        return "use torch.from_numpy(...)" if is_array else "use its .item()"
    if isinstance(value, (int, float, str)):
        return f"it is a subclass of {kind.__mro__[1].__name__}; convert it to the plain type"
    if hasattr(value, "state_dict"):
        return "put its .state_dict() there"
    return (
        "a state holds dicts, lists, tuples, tensors, numbers, strings, booleans and None; "
        "nothing is ever pickled"
    )
