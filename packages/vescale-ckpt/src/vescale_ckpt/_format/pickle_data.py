"""Reads pickles as data: no class is imported, called or changed; tables say what names stand for.

An interpreter of the opcodes that current Pythons and `torch.save` write for plain values, and of
no others. What a pickle may take is bounded: every size by the bytes that are there, and the number
of objects by `MOST_OBJECTS`.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

MOST_OBJECTS: Final = 1 << 24
"""Of a pickle: containers, texts and entries of its memo. They take less than two gigabytes."""

_MOST_NAME = 200


class PickleRefusedError(ValueError):
    """A pickle is damaged, or asks for what no plain value needs."""


@dataclass(slots=True, eq=False, repr=False)  # what is in it may be endless
class Record:
    """What a pickle has of an instance of a class: its name, and its attributes as data."""

    kind: str
    state: Any = None

    def get(self, name: str) -> Any:
        """Return an attribute; None where there is none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class Name(NamedTuple):
    """What a name in a table stands for.

    Attributes:
        call: makes a value of the arguments that the pickle gives; None: it cannot be called.
        kind: of the records that are its instances; "": it has none.
    """

    call: Callable[..., Any] | None = None
    kind: str = ""


# By module and name. What is no `Name` is a value, such as a dtype.
Table = Mapping[tuple[str, str], Any]


def read_pickle(
    data: bytes | memoryview, table: Table, storage: Callable[[Any], Any] | None = None
) -> Any:
    """Return the value of a pickle.

    Args:
        data: the pickle.
        table: the names that it may use.
        storage: makes what a persistent id stands for; None: there is none.

    Raises:
        PickleRefusedError: it is damaged or too large, or names what the table lacks.
    """
    machine = _Machine(data, table, storage)
    try:
        return machine.run()
    except PickleRefusedError:
        raise
    # Of a damaged pickle: something else lies on the stack than an opcode takes.
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        found = f"{type(error).__name__} at byte {machine.at}"
        raise PickleRefusedError(f"it is no whole pickle: {found}") from None


class _Machine:
    """The stack, the marks in it, and the memo."""

    def __init__(
        self, data: bytes | memoryview, table: Table, storage: Callable[[Any], Any] | None
    ) -> None:
        self.data, self.table, self.storage = memoryview(data), table, storage
        self.at = self.objects = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Carry out every opcode."""
        while True:
            code = self.take(1)[0]
            if code == _STOP:
                if len(self.stack) != 1 or self.marks:
                    raise PickleRefusedError("it ends amid a value")
                return self.stack[0]
            carry_out = _OPCODES.get(code)
            if carry_out is None:
                raise PickleRefusedError(f"opcode {code:#04x}, which no plain value needs")
            carry_out(self)

    def take(self, size: int) -> memoryview:
        """Return the next bytes."""
        found = self.data[self.at : self.at + size]
        if len(found) < size:
            raise PickleRefusedError("it was truncated")
        self.at += size
        return found

    def number(self, size: int, *, signed: bool = False) -> int:
        """Return the next bytes as a number."""
        return int.from_bytes(self.take(size), "little", signed=signed)

    def line(self) -> str:
        """Return the text up to the end of a line."""
        text = bytes(self.data[self.at : self.at + _MOST_NAME])
        name, end, _ = text.partition(b"\n")
        if not end:
            raise PickleRefusedError("a name does not end")
        self.at += len(name) + 1
        return name.decode("utf-8")

    def push(self, value: Any) -> None:
        """Put a new object on the stack."""
        self.objects += 1
        if self.objects > MOST_OBJECTS:
            raise PickleRefusedError(f"more than {MOST_OBJECTS} objects")
        self.stack.append(value)

    def from_mark(self) -> list[Any]:
        """Take everything above the last mark."""
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def memoize(self, index: int) -> None:
        """Remember what is on top."""
        top = self.stack[-1]
        self.push(top)
        self.memo[index] = self.stack.pop()

    def name(self, module: str, name: str) -> None:
        """Put what a name stands for."""
        if type(module) is not str or type(name) is not str:
            raise PickleRefusedError("a name is no text")
        if (module, name) not in self.table:
            raise PickleRefusedError(f"it names {module[:80]}.{name[:80]}, which is not plain data")
        self.push(self.table[module, name])

    def reduce(self) -> None:
        """Call what the table has."""
        arguments, made_by = self.stack.pop(), self.stack.pop()
        if not isinstance(made_by, Name) or made_by.call is None or type(arguments) is not tuple:
            raise PickleRefusedError("it calls what is not to be called")
        self.push(made_by.call(*arguments))

    def new(self) -> None:
        """Make a record."""
        arguments, made_by = self.stack.pop(), self.stack.pop()
        if not isinstance(made_by, Name) or not made_by.kind or arguments != ():
            raise PickleRefusedError("it makes an instance of what has none")
        self.push(Record(made_by.kind))

    def build(self) -> None:
        """Give a record its state; nothing else has attributes."""
        state, record = self.stack.pop(), self.stack[-1]
        if type(record) is not Record or record.state is not None:
            raise PickleRefusedError("it sets attributes of what is no record")
        record.state = state

    def set_items(self, pairs: list[Any]) -> None:
        """Put entries into the dict on top."""
        into = self.stack[-1]
        if type(into) is not dict or len(pairs) % 2:
            raise PickleRefusedError("it puts entries into what is no dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # The hash of a nested tuple takes as long, and as deep a stack, as its writer likes;
            # large integers can be chosen to have one hash.
            if type(key) not in (str, int, Record) or (type(key) is int and key.bit_length() > 63):
                raise PickleRefusedError(
                    f"a dict has a key of {type(key).__name__}: texts and integers can be saved"
                )
            into[key] = value

    def append(self, values: list[Any]) -> None:
        """Put entries into the list on top."""
        into = self.stack[-1]
        if type(into) is not list:
            raise PickleRefusedError("it appends to what is no list")
        into.extend(values)

    def persistent(self) -> None:
        """Put a storage."""
        if self.storage is None:
            raise PickleRefusedError("it has storages, which are not there")
        self.push(self.storage(self.stack.pop()))


def _tuple(size: int) -> Callable[[_Machine], None]:
    def carry_out(machine: _Machine) -> None:
        found = tuple(machine.stack[-size:])
        if len(found) < size:
            raise PickleRefusedError("a tuple has too few entries")
        del machine.stack[-size:]
        machine.push(found)

    return carry_out


def _text(width: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(str(m.take(m.number(width)), "utf-8"))


_STOP: Final = ord(".")
_OPCODES: Final[Mapping[int, Callable[[_Machine], Any]]] = {
    0x80: lambda m: m.take(1),  # the protocol
    0x95: lambda m: m.take(8),  # the size of a frame, by which files are read ahead
    ord("("): lambda m: m.marks.append(len(m.stack)),
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("K"): lambda m: m.stack.append(m.number(1)),
    ord("M"): lambda m: m.push(m.number(2)),
    ord("J"): lambda m: m.push(m.number(4, signed=True)),
    0x8A: lambda m: m.push(m.number(m.number(1), signed=True)),
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    ord("X"): _text(4),
    0x8C: _text(1),
    ord("]"): lambda m: m.push([]),
    ord("a"): lambda m: m.append([m.stack.pop()]),
    ord("e"): lambda m: m.append(m.from_mark()),
    ord(")"): lambda m: m.stack.append(()),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("t"): lambda m: m.push(tuple(m.from_mark())),
    ord("}"): lambda m: m.push({}),
    ord("s"): lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]),
    ord("u"): lambda m: m.set_items(m.from_mark()),
    ord("c"): lambda m: m.name(m.line(), m.line()),
    0x93: lambda m: m.name(m.stack.pop(-2), m.stack.pop()),
    ord("R"): _Machine.reduce,
    0x81: _Machine.new,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent,
    ord("q"): lambda m: m.memoize(m.number(1)),
    ord("r"): lambda m: m.memoize(m.number(4)),
    0x94: lambda m: m.memoize(len(m.memo)),
    ord("h"): lambda m: m.stack.append(m.memo[m.number(1)]),
    ord("j"): lambda m: m.stack.append(m.memo[m.number(4)]),
}
