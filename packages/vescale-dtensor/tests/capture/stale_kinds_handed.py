"""Kinds of state that C asks for on behalf of code, and what libraries keep for users to set."""

import calendar
import copy
import copyreg
import csv
import logging
import mimetypes
import multiprocessing
import operator
import os
import types
import typing
import xml.etree.ElementTree

import torch
from stale_kinds import another, factor, factor_is, in_place, kind, mutated
from stale_kinds_asked import asked
from stale_kinds_models import KINDS as KINDS

# --- functions in C that C calls, of which no profiler hears


def in_c(function):
    """What a function gives that an iterator in C calls, and no Python code."""
    return next(iter(function, None))


asked("folder, asked by C", lambda n: os.chdir(("/", "/tmp")[n % 2]), lambda: len(in_c(os.getcwd)))
in_place(
    "getter that is handed over",
    lambda: [torch.get_num_threads],
    lambda v: torch.set_num_threads(3 - torch.get_num_threads()),
    lambda v: next(iter(v[0], None)),
)
in_place(
    "method that is called by its name",
    lambda: [1.0, 2.0],
    lambda v: v.append(3.0),
    lambda v: operator.methodcaller("__len__")(v),
)

# --- what modules of the standard library keep for users to set

asked("first day", lambda n: calendar.setfirstweekday(n % 7), calendar.firstweekday)
asked("longest field", lambda n: csv.field_size_limit(9 + n), csv.field_size_limit)
asked(
    "type of a file",
    lambda n: mimetypes.add_type("a/" + "b" * (n + 1), ".capture"),
    lambda: len(mimetypes.guess_type("a.capture")[0]),
)
asked(
    "how processes start",
    lambda n: multiprocessing.set_start_method(("spawn", "fork")[n % 2], force=True),
    lambda: len(multiprocessing.get_start_method()),
)
asked(
    "names in XML",
    lambda n: xml.etree.ElementTree.register_namespace("a" * (n + 1), "capture"),
    lambda: len(xml.etree.ElementTree.tostring(xml.etree.ElementTree.Element("{capture}b"))),
)


class Copied:
    """Something that a registered function copies."""


COPIED = Copied()
asked(
    "how objects are copied",
    lambda n: copyreg.pickle(Copied, lambda one: (int, (n + 2,))),
    lambda: copy.copy(COPIED),
)

# --- objects of libraries with attributes of the user's, and classes that answer for others


def logger():
    found = logging.Logger("capture")
    found.factor = 2.0
    return found


another("attribute of a logger", logger, factor_is(3.0), factor)


def answering():
    """A Python module whose class has a table of what is missing."""

    class Answering(types.ModuleType):
        table: typing.ClassVar = {"factor": 2.0}

        def __getattr__(self, name):
            return type(self).table[name]

    return Answering("capture_answering")


def other_table(value):
    type(value).table = {"factor": type(value).table["factor"] + 1}


in_place("class of a Python module", answering, other_table, factor)


@typing.runtime_checkable
class Going(typing.Protocol):
    def go(self): ...


def may_go():
    return type("Goes", (), {})()


def goes(value):
    type(value).go = lambda self: None


in_place("protocol", may_go, goes, lambda v: isinstance(v, Going))


def with_builtins():
    """A function that has builtins of its own."""
    space = {"__builtins__": {"abs": lambda value: 2.0}, "__name__": "capture_builtins"}
    exec("def scaled(x):\n    return x * abs(-1)", space)
    return space["scaled"]


def other_builtin(value):
    found = value.__globals__["__builtins__"]
    before = found["abs"](0)
    found["abs"] = lambda value: before + 1


kind("builtins of one file", with_builtins, mutated(other_builtin), lambda x, v: v(x))
