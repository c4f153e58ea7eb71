"""Kinds of state that are values of the standard library, and settings of torch."""

import builtins
import contextvars
import datetime
import decimal
import enum
import importlib
import os
import pathlib
import re
import sys
import threading
import types

import torch
import torch.nn.functional as F
from stale_kinds import another, in_place, kind, mutated
from stale_kinds_asked import asked, setting
from stale_kinds_holding import KINDS as KINDS

# --- values of the library


class Flags(enum.Flag):
    SINE = 1
    DOUBLE = 2
    HALF = 4


another("flags", lambda: Flags.SINE, lambda v: v ^ Flags.DOUBLE, lambda v: Flags.DOUBLE in v)
another("decimal", lambda: decimal.Decimal("1.5"), lambda v: v + 1, float)
another("complex", lambda: 1 + 1j, lambda v: v + 1, lambda v: v.real)
another(
    "date", lambda: datetime.date(2020, 1, 1), lambda v: v + datetime.timedelta(1), lambda v: v.day
)
another(
    "moment with a zone",
    lambda: datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
    lambda v: v.astimezone(datetime.timezone(datetime.timedelta(hours=v.hour + 1))),
    lambda v: v.hour,
)
another("path", lambda: pathlib.Path("a"), lambda v: v / "b", lambda v: len(v.parts))
another(
    "pattern",
    lambda: re.compile("a"),
    lambda v: re.compile(v.pattern + "a"),
    lambda v: 2 if v.fullmatch("aa") else 1,
)
another("shape", lambda: torch.Size([1, 2]), lambda v: torch.Size([*v, 3]), lambda v: v.numel())
another(
    "device",
    lambda: torch.device("cpu"),
    lambda v: torch.device("meta" if v.type == "cpu" else "cpu"),
    lambda v: len(v.type),
)
kind(
    "generator that is drawn from",
    lambda: torch.Generator().manual_seed(1),
    mutated(lambda v: v.manual_seed(v.initial_seed() + 1)),
    lambda x, v: x + torch.rand(4, generator=v),
    lambda v: v.get_state(),
)
LOCAL = threading.local()
asked("thread-local", lambda n: setattr(LOCAL, "scale", 1.0 + n), lambda: LOCAL.scale)
SCALE = contextvars.ContextVar("capture_holding", default=1.0)


kind(
    "default of a context variable",
    lambda: contextvars.ContextVar("with_default", default={"scale": 2.0}),  # noqa: B039
    mutated(lambda v: v.get().update(scale=v.get()["scale"] + 1)),
    lambda x, v: x * v.get()["scale"],
)
in_place(
    "context variable, set to None",
    lambda: contextvars.ContextVar("not_set"),
    lambda v: v.set(None),
    lambda v: v.get(3.0) is None,
)
asked(
    "environment",
    lambda n: os.environ.update(CAPTURE_HOLDING="a" * (n + 1)),
    lambda: len(os.environ["CAPTURE_HOLDING"]),
)
ASCII = ascii
asked(
    "replaced builtin",
    lambda n: setattr(builtins, "ascii", (lambda v: ASCII(v) + "a") if n % 2 else ASCII),
    lambda: len(ascii("ab")),
)
LAZY = types.ModuleType("capture_lazy")
LAZY.table = {"scale": 1.0}
exec("def __getattr__(name):\n    return table[name]", vars(LAZY))
asked("module-level __getattr__", lambda n: LAZY.table.update(scale=1.0 + n), lambda: LAZY.scale)
HERE = pathlib.Path(os.environ.get("TMPDIR", "/tmp")) / f"capture_reloaded_{os.getpid()}.py"


def reloaded(n):
    HERE.write_text(f"SCALE = {1.0 + n}\ndef scaled(x):\n    return x * SCALE\n")
    if str(HERE.parent) not in sys.path:
        sys.path.append(str(HERE.parent))
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    importlib.invalidate_caches()
    sys.modules.pop(HERE.stem, None) if n == 0 else None
    module = importlib.import_module(HERE.stem)
    importlib.reload(module)
    sys.dont_write_bytecode = before
    RELOADED[:] = [module]


RELOADED = []
setting("reloaded module", reloaded, lambda x: RELOADED[0].scaled(x))

# --- settings of torch

asked(
    "default dtype of what is made",
    lambda n: torch.set_default_dtype((torch.float32, torch.float64)[n % 2]),
    lambda: torch.ones(4),
)
asked(
    "default device of what is made",
    lambda n: torch.set_default_device((None, "cpu")[n % 2]),
    lambda: torch.ones(4),
)
asked("grad mode", lambda n: torch.set_grad_enabled(n % 2 == 0), torch.is_grad_enabled)
setting(
    "autocast, switched on",
    lambda n: torch.set_autocast_enabled("cpu", bool(n % 2)),
    lambda x: F.linear(x, WEIGHT),
)
WEIGHT = torch.ones(4, 4)
asked(
    "filled memory",
    lambda n: setattr(torch.utils.deterministic, "fill_uninitialized_memory", n % 2 == 0),
    lambda: torch.utils.deterministic.fill_uninitialized_memory,
)


class Subclass(torch.Tensor):
    scale = 1.0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * cls.scale if func is torch.Tensor.mul else result


kind(
    "tensor with a __torch_function__ of its own",
    lambda: (setattr(Subclass, "scale", 1.0), torch.ones(4).as_subclass(Subclass))[1],
    mutated(lambda v: setattr(Subclass, "scale", Subclass.scale + 1)),
    lambda x, v: x + torch.mul(v, 2.0).as_subclass(torch.Tensor),
)
