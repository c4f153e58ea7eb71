"""The names that a code object reads or writes: globals, attributes, imported modules.

An over-approximation of what a call reads: a branch that does not run counts, and so does an
attribute of any object of that name. Names that are computed (`getattr(self, f"w{i}")`) do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dis import get_instructions
from functools import lru_cache
from itertools import pairwise
from types import CodeType
from typing import Any, NamedTuple

_GLOBAL = frozenset(
    f"{verb}_{what}" for verb in ("LOAD", "STORE", "DELETE") for what in ("GLOBAL", "NAME")
)
_ATTRIBUTE = frozenset(
    ["LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "IMPORT_FROM", "LOAD_SUPER_ATTR"]
)
# Texts given to these are the names of attributes.
_BY_STRING = frozenset({"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller"})


class CodeNames(NamedTuple):
    """What a code object names, with the functions that are defined inside.

    Attributes:
        globals: names of globals and builtins.
        attributes: names of attributes; of a function that names `getattr`, all its texts.
        stored: of these, what is set and not read.
        modules: what `import` statements inside of it import.
        texts: that it has as constants, those in tuples among them.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    stored: frozenset[str]
    modules: frozenset[str]
    texts: frozenset[str]


# Code objects are equal by contents, and equal code has the same names.
@lru_cache(maxsize=4096)
def code_names(code: CodeType) -> CodeNames:
    """The names in a code object."""
    instructions = list(get_instructions(code))
    globals_ = {i.argval for i in instructions if i.opname in _GLOBAL}
    attributes = {i.argval for i in instructions if i.opname in _ATTRIBUTE}
    stored = {i.argval for i in instructions if i.opname == "STORE_ATTR"}
    stored -= {i.argval for i in instructions if i.opname in _ATTRIBUTE - {"STORE_ATTR"}}
    modules = {i.argval for i in instructions if i.opname == "IMPORT_NAME"}
    texts = set(_texts_in(code.co_consts))
    if _BY_STRING & (globals_ | attributes):
        attributes |= {part for text in texts for part in text.split(".")}
    for before, instruction in pairwise(instructions):
        if instruction.opname == "MATCH_CLASS":  # `case Point(x=1)`
            attributes.update(before.argval)
            if instruction.arg:  # `case Point(x)`
                attributes.add("__match_args__")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found = code_names(inner)
            globals_ |= found.globals
            attributes |= found.attributes
            stored -= found.attributes
            modules |= found.modules
            texts |= found.texts
    return CodeNames(*map(frozenset, (globals_, attributes, stored - texts, modules, texts)))


def _texts_in(constants: Iterable[Any]) -> Iterator[str]:
    """Those that may be names."""
    for one in constants:
        if isinstance(one, tuple | frozenset):  # `for name in ("up", "down")`
            yield from _texts_in(one)
        elif type(one) is str and len(one) < 100:
            yield one


def stored_at(code: CodeType, name: str) -> int | None:
    """The line on which a code object writes, or first mentions, a name; None if it does not."""
    line, mentioned = code.co_firstlineno, None
    for instruction in get_instructions(code):
        started: Any = instruction.starts_line  # from CPython 3.13 on only whether one does
        if isinstance(started, bool):
            started = getattr(instruction, "line_number", None)
        line = started or line
        if instruction.argval == name:
            if instruction.opname.startswith("STORE"):
                return line
            mentioned = mentioned or line
    inner = (stored_at(one, name) for one in code.co_consts if isinstance(one, CodeType))
    return mentioned or next((line for line in inner if line is not None), None)
