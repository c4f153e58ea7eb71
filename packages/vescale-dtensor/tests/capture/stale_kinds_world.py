"""Kinds of state of the process, of files and of other threads, and what a function leaves behind.

And code of the user's in files and modules that have the names of libraries.
"""

import codecs
import concurrent.futures
import ctypes
import datetime
import faulthandler
import gc
import importlib.resources
import importlib.util
import json
import locale
import logging
import os
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
import types
import warnings
from importlib import import_module
from pathlib import Path
from pkgutil import get_data
from runpy import run_path

import numpy
import torch
from stale_kinds import Settings, factor, grow, in_place, itself, kind, mutated
from stale_kinds_asked import asked
from stale_kinds_library_objects import KINDS as KINDS

# On one core, on other systems, and where no safetensors are installed.
MAY_BE_LACKING = {"cores of the process", "file of safetensors"}

# --- the process

asked(
    "handler of faults",
    lambda n: faulthandler.enable(sys.__stderr__) if n % 2 else faulthandler.disable(),
    faulthandler.is_enabled,
)
asked(
    "trace function",
    lambda n: sys.settrace((lambda *event: None) if n % 2 else None),
    lambda: sys.gettrace() is None,
)
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
if len(CORES) > 1:
    asked(
        "cores of the process",
        lambda n: os.sched_setaffinity(0, CORES[: len(CORES) - n % 2]),
        lambda: len(os.sched_getaffinity(0)),
    )


def in_zone(number):
    os.environ["TZ"] = ("UTC", "AB-3", "ABC-5")[number % 3]
    time.tzset()


for title, use in {
    "from a number": lambda: 1 + datetime.datetime.fromtimestamp(172800).hour,
    "of the C library": lambda: time.mktime((2020, 1, 1, 0, 0, 0, 0, 0, 0)) % 100000,
}.items():
    asked(f"zone of the process, {title}", in_zone, lambda use=use: use())
asked(
    "name of a level",
    lambda n: logging.addLevelName(10, "D" * (n + 1)),
    lambda: len(logging.getLevelName(10)),
)
asked(
    "handler of encodings",
    lambda n: codecs.register_error("stale", lambda error: ("?" * (n + 1), error.end)),
    lambda: len("ä".encode("ascii", "stale")),
)
INDEX = ctypes.c_int.in_dll(ctypes.CDLL(None), "optind")
asked(
    "variable of C",
    lambda n: setattr(INDEX, "value", n + 1),
    lambda: ctypes.c_int.in_dll(ctypes.CDLL(None), "optind").value,
)
FSUM, DEFAULT = statistics.fsum, json.JSONEncoder.default
asked(
    "function that the standard library calls",
    lambda n: setattr(statistics, "fsum", (lambda values: n) if n else FSUM),
    lambda: statistics.fmean([1.0, 2.0]),
)

# --- files that libraries read

FOLDER = tempfile.mkdtemp()
sys.path.insert(0, FOLDER)


def file(name, text=""):
    path = Path(FOLDER, name)
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    return str(path)


def texts(name, form="{}"):
    """Another text in a file each time, as long as it is."""
    return lambda n: file(name, form.format("a" * (n + 1)))


file("stale_package/__init__.py")
import_module("stale_package")  # of this process, and not of the one which has started it
IN_PACKAGE = "stale_package/text.txt"
TEXT = file("stale.txt")
asked("data of a package", texts(IN_PACKAGE), lambda: len(get_data("stale_package", "text.txt")))
asked("program that is run", texts("stale.txt", "text = '{}'"), lambda: len(run_path(TEXT)["text"]))
if importlib.util.find_spec("safetensors"):
    SAVED = f"{FOLDER}/stale.safetensors"
    files = import_module("safetensors.torch")
    asked(
        "file of safetensors",
        lambda n: files.save_file({"scale": torch.full((4,), n + 1.0)}, SAVED),
        lambda: files.load_file(SAVED)["scale"],
    )

# --- names of libraries

CODE = """
TABLE = {"scale": 2.0}
class Own:
    factor = 2.0
    def times(self, x):
        return x * self.factor
def scaled(x):
    return x * TABLE["scale"]
def of_box(x, box):
    return x * box.factor
"""


def module_at(path, name):
    """A module of the user's in some file, with a name as it is imported by."""
    found = types.ModuleType(name)
    found.__file__ = path
    exec(compile(CODE, path, "exec"), vars(found))
    return found


def taking(name, path):
    """A module in place of one of the standard library that has its name."""
    package, module = types.ModuleType(name), module_at(path, f"{name}.settings")
    package.__path__ = [str(Path(path).parent)]
    sys.modules[name], sys.modules[f"{name}.settings"] = package, module
    return module


# Nobody imports this folder of old modules, and its name is as good as any.
NAMED = taking("this", f"{FOLDER}/this/settings.py")
OWN = NAMED.Own


def named(value):
    NAMED.TABLE["scale"], OWN.factor = 2.0, 2.0
    return value


next_in_table = mutated(lambda v: NAMED.TABLE.update(scale=NAMED.TABLE["scale"] + 1))
next_factor = mutated(grow("factor"))
for title, value, change, use in (
    ("table of", NAMED, next_in_table, lambda x, v: x * v.TABLE["scale"]),
    ("function of", NAMED, next_in_table, lambda x, v: v.scaled(x)),
    ("class of", OWN, next_factor, lambda x, v: x * v.factor),
):
    kind(f"{title} a module named as one of Python's", lambda v=value: named(v), change, use)
BESIDE = str(Path(torch.__file__).parent)
for title, path in {
    "beside torch": f"{BESIDE}vision/ops.py",
    "in a folder named numpy": f"{FOLDER}/numpy/exercise.py",
    "in a folder named as a package of ours": f"{FOLDER}/vescale_rng/exercise.py",
}.items():
    code = module_at(path, "stale_exercise")
    kind(f"code {title}", Settings, next_factor, lambda x, v, code=code: code.of_box(x, v))

# --- other threads

WORKERS = []


def workers():
    """A pool whose thread has started, and queues that a thread answers."""
    if not WORKERS:
        pool = concurrent.futures.ThreadPoolExecutor(1)
        pool.submit(int).result()
        asked, answers = queue.Queue(), queue.Queue()

        def answer():
            while True:
                answers.put(asked.get()())

        threading.Thread(target=answer, daemon=True).start()
        WORKERS.extend((pool, asked, answers))
    return WORKERS


def asked_by_queue(function):
    _, asked, answers = workers()
    asked.put(function)
    return answers.get()


def changed_by_a_thread(value):
    thread = threading.Thread(target=lambda: next_factor(value))
    thread.start()
    thread.join()


in_place("changed by another thread", Settings, changed_by_a_thread, factor)
for title, use in {
    "tensor of a pool": lambda x, v: workers()[0].submit(lambda: x * v.factor).result(),
    "answer by a queue": lambda x, v: x * asked_by_queue(lambda: v.factor),
}.items():
    kind(title, Settings, next_factor, use)

# --- what is left behind


def left(name, act, undo, seen):
    """A function sets something of the process, and what it has set is undone after each call."""

    def seen_and_undone(value):
        found = seen()
        undo()
        return found

    kind(name, undo, itself, lambda x, v: (act(), x * 2)[1], seen_and_undone)


left(
    "threads set inside",
    lambda: torch.set_num_threads(1),
    lambda: torch.set_num_threads(2),
    torch.get_num_threads,
)
left(
    "deterministic set inside",
    lambda: torch.use_deterministic_algorithms(True),
    lambda: torch.use_deterministic_algorithms(False),
    torch.are_deterministic_algorithms_enabled,
)
left(
    "printing set inside",
    lambda: torch.set_printoptions(precision=2),
    lambda: torch.set_printoptions(precision=4),
    lambda: str(torch.tensor(1 / 3)),
)
left(
    "seed of Python set inside",
    lambda: random.seed(5),
    lambda: random.seed(6),
    lambda: random.getstate()[1][0],
)
left(
    "seed of numpy set inside",
    lambda: numpy.random.seed(5),
    lambda: numpy.random.seed(6),
    lambda: numpy.random.get_state()[1][0],
)
left("collector switched off inside", gc.disable, gc.enable, gc.isenabled)
left(
    "filter of warnings set inside",
    lambda: warnings.simplefilter("ignore"),
    warnings.resetwarnings,
    lambda: len(warnings.filters),
)
left(
    "logging disabled inside",
    lambda: logging.disable(10),
    lambda: logging.disable(0),
    lambda: logging.root.manager.disable,
)
left(
    "locale set inside",
    lambda: locale.setlocale(locale.LC_ALL, "C"),
    lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8") and None,
    lambda: locale.setlocale(locale.LC_ALL),
)
