"""The names that a code object reads or writes: globals, attributes, imported modules.

A recording asks this of every function that runs in it. Names are an over-approximation of what
was read: a branch that did not run counts, and so does an attribute of any object of that name.
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Iterator
from dis import Instruction, get_instructions, stack_effect
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
# The second argument of these is the name of an attribute.
_BY_STRING = frozenset({"getattr", "setattr", "hasattr", "delattr"})
_PLAIN_LOADS = frozenset({"LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"})
_VARIABLES = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"})
_PARTS = frozenset({"LOAD_ATTR", "IMPORT_FROM"})
_STEPS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
# Where a call puts a NULL beside the function: before it up to CPython 3.12. In the lowest bit of
# what loads a global; of an attribute, too, where there is no LOAD_METHOD.
_NULL_AFTER = sys.version_info >= (3, 13)
_METHODS_IN_ATTR = sys.version_info >= (3, 12)
# Whoever names one of these may find that an attribute is missing, or a name to import.
_MISSES = frozenset(
    {"AttributeError", "Exception", "BaseException", "suppress", "ImportError"}
    | {"ModuleNotFoundError"}
)
_CATCHES = frozenset({"CHECK_EXC_MATCH", "CHECK_EG_MATCH"})
_DECIDES = _CATCHES | {"RERAISE", "WITH_EXCEPT_START"}
# Methods that may swallow an exception which names nothing there.
_ENDS = frozenset({"__exit__", "__aexit__"})
# Whoever names one of these may read an attribute of any name.
_BY_ANY_NAME = frozenset(
    {"__dict__", "vars", "attrgetter", "methodcaller", "__getattribute__"}
    | {"dir", "__getstate__", "__reduce__", "__reduce_ex__"}
)
# Whoever names one of these may be given a Python module by its name.
_BY_MODULE = frozenset({"import_module", "__import__", "modules"})
# Beside `is`.
_BY_IDENTITY = frozenset({"id", "is_", "is_not"})
_FORMATS = frozenset({"format", "format_map"})
# A field of a format with an attribute: "{0.name}".
_ATTRIBUTE_IN_FORMAT = re.compile(r"\{\w*(\[[^]]*\])*\.")


class CodeNames(NamedTuple):
    """What a code object names.

    Attributes:
        globals: names of globals and builtins.
        attributes: names of attributes, constant strings given to `getattr` among them.
        modules: what `import` statements inside of it import.
        any_attribute: whether it may use attributes whose names are not in it.
        optional: those of attributes that it can do without.
        goes_on: whether what it calls may lack attributes without an error that ends the call.
        texts: constant strings in it that may be names of Python modules.
        identity: whether it may ask which of two equal objects it has.
        values: names of variables whose values it takes other than to call them.
        parts: names of attributes of which it does.
        paths: globals with the attributes that are read one of another: ("torch", "nn", "Linear").
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    modules: tuple[str, ...]
    any_attribute: bool
    optional: frozenset[str]
    goes_on: bool
    texts: tuple[str, ...]
    identity: bool
    values: frozenset[str]
    parts: frozenset[str]
    paths: frozenset[tuple[str, ...]]


# Code objects are equal by contents, and equal code has the same names.
@lru_cache(maxsize=4096)
def code_names(code: CodeType) -> CodeNames:
    """The names in a code object; not those of functions defined inside, which have their own."""
    instructions = [i for i in get_instructions(code) if i.opname != "CACHE"]
    globals_ = {i.argval for i in instructions if i.opname in _GLOBAL}
    attributes = {i.argval for i in instructions if i.opname in _ATTRIBUTE}
    modules = tuple(i.argval for i in instructions if i.opname == "IMPORT_NAME")
    found = list(_strings(instructions))
    strings = {name for name in found if name is not None}
    # None: a name that is computed may be any.
    any_attribute = None in found or bool(_BY_ANY_NAME & (globals_ | attributes))
    strings |= set(_in_patterns(instructions))
    texts = tuple(text for text in code.co_consts if type(text) is str)
    if _FORMATS & attributes and any(map(_ATTRIBUTE_IN_FORMAT.search, texts)):
        any_attribute = True
    # `case Point(1, 2)` reads the attributes that the class says, `case Point(x=1)` those named.
    any_attribute |= any(i.opname == "MATCH_CLASS" and i.arg for i in instructions)
    # A missing attribute is read, too, where code goes on without it: to have one later makes a
    # difference.
    goes_on = code.co_name in _ENDS or bool(_MISSES & globals_) or _may_catch(instructions)
    optional = strings | (attributes if goes_on else set())
    names = frozenset(globals_), frozenset(attributes | strings)
    by_module = _BY_MODULE & (globals_ | attributes)
    asked = any(_compares_objects(*pair) for pair in pairwise(instructions))
    return CodeNames(
        *names,
        modules,
        any_attribute,
        frozenset(optional),
        goes_on or bool(strings),
        texts if by_module else (),
        asked or bool(_BY_IDENTITY & (globals_ | attributes)),
        frozenset(_taken(instructions, _VARIABLES)),
        frozenset(strings | set(_taken(instructions, _PARTS))),
        frozenset(_paths(instructions)),
    )


def _paths(instructions: list[Instruction]) -> Iterator[tuple[str, ...]]:
    """Each global of which an attribute is read, with it, and with what is read of that in turn."""
    path: list[str] = []
    for instruction in instructions:
        if path and instruction.opname in _STEPS:
            path.append(instruction.argval)
            continue
        if len(path) > 1:
            yield tuple(path)
        path = [instruction.argval] if instruction.opname in _GLOBAL else []


def _may_catch(instructions: list[Instruction]) -> bool:
    """Whether a handler may take what a missing attribute raises."""
    handling = False
    for at, (one, after) in enumerate(pairwise(instructions)):
        # `except:`, and `return` in `finally`: done with it, and neither asked nor raised again.
        if handling and one.opname == "POP_EXCEPT":
            return True
        handling = one.opname == "PUSH_EXC_INFO" or (handling and one.opname not in _DECIDES)
        if after.opname in _CATCHES:
            many = one.arg if one.opname == "BUILD_TUPLE" else None
            named = [one] if many is None else instructions[at - many : at]
            if not all(i.opname in _GLOBAL and _is_other_error(i.argval) for i in named):
                return True
    return False


def _is_other_error(name: str) -> bool:
    """Whether a class of Python's has this name, of errors that have to do with no attribute."""
    found = getattr(builtins, name, None)
    return isinstance(found, type) and name not in _MISSES


def _taken(instructions: list[Instruction], loads: frozenset[str]) -> Iterator[str]:
    """The names whose values these instructions take, and do not call at once."""
    for at, instruction in enumerate(instructions):
        if instruction.opname in loads and not _is_called(instructions, at):
            yield instruction.argval


def _is_called(instructions: list[Instruction], at: int) -> bool:
    """Whether a call follows of what an instruction loads: then a NULL lies beside it."""
    if _NULL_AFTER and instructions[at + 1].opname == "PUSH_NULL":
        return True
    start = at
    while start and instructions[start].opname == "LOAD_ATTR":  # `a.b.c()` may have it before `a`
        if _METHODS_IN_ATTR and (instructions[start].arg or 0) & 1:
            return start == at
        start -= 1
    first = instructions[start]
    if first.opname == "LOAD_GLOBAL" and (first.arg or 0) & 1:
        return True
    return not _NULL_AFTER and instructions[start - 1].opname == "PUSH_NULL"


def _compares_objects(before: Instruction, instruction: Instruction) -> bool:
    """Whether an instruction is `is` between objects, and not with None or True."""
    return instruction.opname == "IS_OP" and before.opname != "LOAD_CONST"


def _in_patterns(instructions: list[Instruction]) -> Iterator[str]:
    """The attributes that patterns of `match` name."""
    for before, instruction in pairwise(instructions):
        if instruction.opname == "MATCH_CLASS":
            yield from before.argval


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
    return mentioned


def _strings(instructions: list[Instruction]) -> Iterator[str | None]:
    """For each use of `getattr` and its kin: the constant name it is given, or None."""
    for start, instruction in enumerate(instructions):
        if instruction.opname in _GLOBAL and instruction.argval in _BY_STRING:
            yield _second_argument(instructions[start + 1 :])


def _second_argument(rest: list[Instruction]) -> str | None:
    """The second argument of a call whose function was just loaded, if it is a constant string.

    Follows the depth of the stack from the loaded function on. Anything but a plain third argument
    after the string, or a jump, after which the depth is not known, counts as not constant.
    """
    depth, found = 0, None
    for instruction in rest:
        before, name = depth, instruction.opname
        if "JUMP" in name or name.startswith(("FOR", "RETURN")):
            return None
        depth += stack_effect(instruction.opcode, instruction.arg)
        # The function itself was taken off: this was its call, or something that is none.
        if depth < 0:
            return found if name == "CALL" else None
        if before == 1 and depth == 2:
            constant = name == "LOAD_CONST" and type(instruction.argval) is str
            found = instruction.argval if constant else None
        elif name == "PRECALL" and depth == 0:
            continue  # of this call itself: it takes the arguments off in CPython 3.11
        elif before >= 2 and not (name in _PLAIN_LOADS or (name == "LOAD_ATTR" and before == 3)):
            found = None
    return None
