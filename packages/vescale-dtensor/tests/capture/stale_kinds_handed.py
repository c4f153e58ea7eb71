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

import numpy
import torch
from stale_kinds import factor_is, kind, mutated, of_attribute
from stale_kinds_asked import doubled_if, setting
from stale_kinds_models import KINDS as KINDS

# --- functions in C that C calls, of which no profiler hears


def called_by_c(function):
    """What a function gives that an iterator in C calls, and no Python code."""
    return next(iter(function, None))


setting(
    "folder, asked by C",
    lambda n: os.chdir(("/", "/tmp")[n % 2]),
    lambda x: x * len(called_by_c(os.getcwd)),
)
setting(
    "number of threads, asked by C",
    lambda n: torch.set_num_threads(1 + n % 2),
    lambda x: x * called_by_c(torch.get_num_threads),
)
setting(
    "deterministic algorithms, asked by C",
    lambda n: torch.use_deterministic_algorithms(bool(n % 2)),
    doubled_if(lambda: called_by_c(torch.are_deterministic_algorithms_enabled)),
)
kind(
    "getter that is handed over",
    lambda: [torch.get_num_threads],
    mutated(lambda v: torch.set_num_threads(3 - torch.get_num_threads())),
    lambda x, v: x * next(iter(v[0], None)),
)
kind(
    "method that is called by its name",
    lambda: [1.0, 2.0],
    mutated(lambda v: v.append(3.0)),
    lambda x, v: x * operator.methodcaller("__len__")(v),
)

# --- what modules of the standard library keep for users to set

setting(
    "first day", lambda n: calendar.setfirstweekday(n % 7), lambda x: x * calendar.firstweekday()
)
setting(
    "longest field",
    lambda n: csv.field_size_limit(9 + n),
    lambda x: x * csv.field_size_limit(),
)
setting(
    "dialects of tables",
    lambda n: csv.register_dialect("capture", delimiter="abcd"[n % 4]),
    lambda x: x * ord(csv.get_dialect("capture").delimiter),
)
setting(
    "type of a file",
    lambda n: mimetypes.add_type("a/" + "b" * (n + 1), ".capture"),
    lambda x: x * len(mimetypes.guess_type("a.capture")[0]),
)
setting(
    "how processes start",
    lambda n: multiprocessing.set_start_method(("spawn", "fork")[n % 2], force=True),
    lambda x: x * len(multiprocessing.get_start_method()),
)
setting(
    "names in XML",
    lambda n: xml.etree.ElementTree.register_namespace("a" * (n + 1), "capture"),
    lambda x: x * len(xml.etree.ElementTree.tostring(xml.etree.ElementTree.Element("{capture}b"))),
)
setting("buffers of numpy", lambda n: numpy.setbufsize(16 * (n + 1)), lambda x: x * of_numpy())
setting(
    "environment of bytes, by a function",
    lambda n: os.environ.__setitem__("CAPTURE_BYTES", "a" * (n + 1)),
    lambda x: x * len(os.getenvb(b"CAPTURE_BYTES")),
)


def of_numpy():
    return numpy.getbufsize() / 16


class Copied:
    """Something that a registered function copies."""


COPIED = Copied()
setting(
    "how objects are copied",
    lambda n: copyreg.pickle(Copied, lambda one: (int, (n + 2,))),
    lambda x: x * copy.copy(COPIED),
)

# --- objects of libraries with attributes of the user's, and classes that answer for others


def logger():
    found = logging.Logger("capture")
    found.factor = 2.0
    return found


kind("attribute of a logger", logger, factor_is(3.0), of_attribute)


def answering():
    """A Python module whose class has a table of what is missing."""

    class Answering(types.ModuleType):
        table: typing.ClassVar = {"factor": 2.0}

        def __getattr__(self, name):
            return type(self).table[name]

    return Answering("capture_answering")


def other_table(value):
    type(value).table = {"factor": type(value).table["factor"] + 1}


kind("class of a Python module", answering, mutated(other_table), of_attribute)


@typing.runtime_checkable
class Going(typing.Protocol):
    def go(self): ...


def may_go():
    return type("Goes", (), {})()


def goes(value):
    type(value).go = lambda self: None


kind(
    "protocol",
    may_go,
    mutated(goes),
    lambda x, v: x * 2 if isinstance(v, Going) else x,
)


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
