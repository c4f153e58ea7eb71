"""Kinds of state behind names of libraries, in the order of sets, and beside namespaces."""

import asyncio
import decimal
import threading
import types

import torch
import torch.nn.functional as F
from stale_kinds import in_place, kind, mutated
from stale_kinds_asked import KINDS as KINDS
from stale_kinds_asked import asked, setting
from torch import nn

# --- names of torch, which users replace by functions of their own


def replacing(name, owner, attribute, use):
    """A kind whose change replaces a function by one that doubles, and puts it back."""
    original = getattr(owner, attribute)

    def doubled(*args, **kwargs):
        return original(*args, **kwargs) * 2

    setting(name, lambda n: setattr(owner, attribute, doubled if n % 2 else original), use)


GELU = nn.GELU()
replacing("function of torch", torch, "relu", lambda x: torch.relu(x - 1))
replacing("function that a module of torch calls", F, "gelu", lambda x: GELU(x))

# By names that are computed: what users write in configurations.
ACTIVATIONS = {"class": "Softsign", "method": "si" + "nh", "new": "added_later"}


SOFTSIGN = nn.Softsign
setting(
    "class of torch, by a computed name",
    lambda n: setattr(nn, "Softsign", nn.Tanh if n % 2 else SOFTSIGN),
    lambda x: getattr(nn, ACTIVATIONS["class"])()(x - 1),
)
replacing(
    "method of tensors, by a computed name",
    torch.Tensor,
    "sinh",
    lambda x: getattr(x, ACTIVATIONS["method"])(),
)


def added_or_not(n):
    if n % 2:
        F.added_later = torch.sin
    else:
        vars(F).pop("added_later", None)


setting(
    "function added to torch", added_or_not, lambda x: getattr(F, ACTIVATIONS["new"], F.relu)(x - 1)
)

# --- settings behind objects of libraries

POLICY = asyncio.DefaultEventLoopPolicy()


def native_kernels():
    """Those that are written in Triton; anything with such an attribute where torch has none."""
    return getattr(
        getattr(torch.backends, "python_native", None),
        "triton",
        types.SimpleNamespace(enabled=True),
    )


asked(
    "digits of decimals",
    lambda n: setattr(decimal.getcontext(), "prec", 28 - n),
    lambda: float(decimal.Decimal(1) / decimal.Decimal(7)),
)
asked(
    "policy of event loops",
    lambda n: asyncio.set_event_loop_policy(POLICY if n % 2 else None),
    lambda: asyncio.get_event_loop_policy() is POLICY,
)
asked(
    "kernels of torch in Python",
    lambda n: setattr(native_kernels(), "enabled", n % 2 == 0),
    lambda: native_kernels().enabled,
)
asked(
    "name of the thread",
    lambda n: setattr(threading.current_thread(), "name", "Thread" + "a" * n),
    lambda: len(threading.current_thread().name),
)

# --- orders of equal sets


def through(x, value):
    for item in value:
        x = x * 1.3 + item
    return x


def turned_around(value):
    items = list(value)
    value.clear()
    for item in reversed(items):
        value.add(item)


# Both fall on one place of the table, which the first to come takes.
kind("order of a set", lambda: {0, 8}, mutated(turned_around), through)
kind("order of a frozenset", lambda: frozenset([0, 8]), lambda v: frozenset([*v][::-1]), through)

# --- what exceptions have beside their namespaces

in_place(
    "arguments of an exception",
    lambda: ValueError(2.0),
    lambda v: setattr(v, "args", (v.args[0] + 1,)),
    lambda v: v.args[0],
)
