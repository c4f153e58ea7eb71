"""Defines the messages between the test process and its workers.

Only ever spoken between a process and children that it started itself. Tensors travel as copies of
their bytes: torch's own way, shared memory behind file descriptors, outlives neither a worker nor a
long test run.
"""

import importlib
import sys
import warnings
from dataclasses import dataclass, field, replace
from functools import reduce
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from vescale_comm._torch.buffers import flattened, plain


@dataclass(frozen=True, slots=True)
class Case:
    """A function to run on every rank.

    Attributes:
        path: file that it is in.
        module: name of the file's module in the test process.
        qualname: name of the function in the module.
        args: its arguments, packed until the file is loaded: they may be of its classes.
        patience: seconds to wait for other ranks under `checked`; None: not checked.
        fresh: whether the process groups are made anew first.
        filters: what becomes of warnings: in a worker the same as in the test process.
        sys_path: where modules are found.
    """

    path: str
    module: str
    qualname: str
    args: bytes
    patience: float | None = None
    fresh: bool = False
    filters: list[Any] = field(default_factory=lambda: list(warnings.filters))
    sys_path: list[str] = field(default_factory=lambda: list(sys.path))

    def in_fresh_world(self) -> "Case":
        """Return the same case, to be run after the process groups have been made anew."""
        return replace(self, fresh=True)


@dataclass(frozen=True, slots=True)
class Done:
    """A rank's answer to a case; `outcome` is packed, `output` is what was printed."""

    outcome: bytes
    failed: bool
    output: str
    groups: int


class _Packer(ForkingPickler):
    # Of its own: registering in the base class would change how the user's processes send tensors.
    _extra_reducers: dict[type, Any] = {}  # noqa: RUF012 (the name and the form are the base's)

    def reducer_override(self, value: Any) -> Any:
        """Name classes and functions in a way that asks for no parent package.

        pickle imports the parents of a module even where the module itself is loaded. A file that
        was loaded by its path has none: `packages` in `packages.x.tests.test_y` is no package.
        """
        named = isinstance(value, type | FunctionType) and "." in (value.__module__ or "")
        # What refuses <locals> and <lambda> in good words is pickle itself.
        if not named or "<" in value.__qualname__ or value in (_known_as, _put_together):
            return NotImplemented
        return _known_as, (value.__module__, value.__qualname__)


def _known_as(module: str, qualname: str) -> Any:
    found = sys.modules.get(module) or importlib.import_module(module)
    return reduce(getattr, qualname.split("."), found)


def pack(message: object) -> bytes:
    """Turn a message into bytes."""
    return bytes(_Packer.dumps(message))


def unpack(data: bytes) -> Any:
    """Turn bytes into the message."""
    return ForkingPickler.loads(data)


def send(connection: "Connection[Any, Any]", message: object) -> None:
    """Send a message."""
    connection.send_bytes(pack(message))


def receive(connection: "Connection[Any, Any]") -> Any:
    """Wait for a message. Raises EOFError when the other side is gone."""
    return unpack(connection.recv_bytes())


def _take_apart(x: Tensor) -> tuple[Any, ...]:
    sent = plain(x.detach().cpu())
    data = flattened(sent).view(torch.uint8).numpy().tobytes()
    # Bytes, because numpy has no bfloat16 or fp8.
    return _put_together, (data, x.dtype, tuple(x.shape))


def _put_together(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # A bytearray: bytes must not be written, and torch warns of a tensor over them.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


_Packer.register(Tensor, _take_apart)
