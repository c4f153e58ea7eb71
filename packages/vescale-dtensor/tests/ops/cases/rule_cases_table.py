"""Cases: every function of the rule table itself, in the first ways in which torch can be called.

The hand-written cases say what is interesting. These are drawn from the table, so that a new rule
is fuzzed without anybody thinking of it.
"""

from __future__ import annotations

import logging
import warnings

import torch
from rule_fuzz import T, values
from rule_table import A, B, add
from vescale_dtensor._dispatch.registry import known_handlers, known_rules
from vescale_dtensor._planning.plan import function_name

MOST_WAYS = 2
# Not on this machine, or not without what only its own callers give it.
LEFT_OUT = frozenset({"Tensor.cuda"})
# What they are given has to be sorted, or of one shape only (of others torch reads memory that
# nobody filled): `rule_cases_written` does that.
OF_ONE_KIND = frozenset({"torch.searchsorted", "torch.bucketize", "torch._weight_norm"})
WHOLE, FLAGS = T((5, 4), "i", low=1), T((5, 4), "b")
SQUARES, ROWS = T((3, 4, 4)), T((4,))

# The operands, and how they are passed.
WAYS = (
    ((A,), lambda f, x: f(x)),
    ((A, A), lambda f, x, y: f(x, y)),
    ((A, B), lambda f, x, y: f(x, y)),
    ((A, A, A), lambda f, x, y, z: f(x, y, z)),
    ((WHOLE,), lambda f, x: f(x)),
    ((WHOLE, WHOLE), lambda f, x, y: f(x, y)),
    ((FLAGS, FLAGS), lambda f, x, y: f(x, y)),
    ((FLAGS, A, A), lambda f, c, x, y: f(c, x, y)),
    ((A, FLAGS), lambda f, x, c: f(x, c, 0.5)),
    ((A, A), lambda f, x, y: f([x, y])),
    ((A, A), lambda f, x, y: f([x, y], 1)),
    ((A,), lambda f, x: f(x, 1)),
    ((A,), lambda f, x: f(x, 0, 1)),
    ((A,), lambda f, x: f(x, 0.5)),
    ((A,), lambda f, x: f(x, -0.5, 0.5)),
    ((A,), lambda f, x: f(x, 0, 1, 2)),
    ((A,), lambda f, x: f(x, (1, 0))),
    ((A,), lambda f, x: f(1, x)),
    ((A,), lambda f, x: f(x, [2, 3])),
    ((A,), lambda f, x: f(x, (2, 5, 4))),
    ((A,), lambda f, x: f(x, (4, 5))),
    ((A,), lambda f, x: f(x, 0, (5, 1))),
    ((A,), lambda f, x: f(x, (4,))),
    ((A,), lambda f, x: f(x, 0, torch.tensor([0, 2]))),
    ((SQUARES,), lambda f, x: f(x)),
    ((SQUARES, SQUARES), lambda f, x, y: f(x, y)),
    ((SQUARES, SQUARES, SQUARES), lambda f, x, y, z: f(x, y, z)),
    ((T((4, 4)), T((4, 4))), lambda f, x, y: f(x, y)),
    ((T((4, 4)), ROWS), lambda f, x, y: f(x, y)),
    ((ROWS, ROWS), lambda f, x, y: f(x, y)),
    ((ROWS, ROWS), lambda f, x, y: f([x, y])),
    ((ROWS,), lambda f, x: f(x)),
    ((T((4, 4)), T((4, 4)), T((4, 4))), lambda f, x, y, z: f(x, y, z)),
    ((T((2, 3), "i", high=5), A), lambda f, i, x: f(i, x)),
    ((A, T((5,), "i", high=4)), lambda f, x, i: f(x, i)),
    ((A, T((5, 3), "i", high=4)), lambda f, x, i: f(x, 1, i)),
    ((SQUARES,), lambda f, x: f(x, 2)),
    ((T((2, 3, 5, 4)),) * 3, lambda f, q, k, v: f(q, k, v)),
    ((T((2, 3, 6, 6)), T((4, 3, 3, 3))), lambda f, x, w: f(x, w)),
    ((T((2, 3, 6)), T((4, 3, 3))), lambda f, x, w: f(x, w)),
)


def works(func, way, operands):
    """Whether torch itself takes such a call, and gives tensors."""
    generator = torch.Generator().manual_seed(0)
    try:
        result = way(func, *[values(operand, generator) for operand in operands])
    except Exception:  # whatever torch says of a call that makes no sense
        return False
    items = result if isinstance(result, list | tuple) else [result]
    return bool(items) and all(isinstance(item, torch.Tensor) for item in items)


def written(func):
    """The function, applied to copies: cases keep their operands."""

    def call(first, *others):
        # Autograd allows a write to what is no leaf.
        return func(first * 1 if first.dtype.is_floating_point else first.clone(), *others)

    return call


def composed():
    """Functions that run as others do, each by its own rule."""
    return [f for f, run in known_handlers().items() if run.__module__.endswith(".composed")]


def _file():
    named = {}
    for func in [*known_rules(), *composed()]:
        named.setdefault(function_name(func), []).append((func, known_rules().get(func)))
    for name in sorted(named):
        for place, (func, rule) in enumerate(named[name]):
            if name in LEFT_OUT | OF_ONE_KIND:
                continue
            target = func if rule is None or rule.writes is None else written(func)
            ways = [(way, operands) for operands, way in WAYS if works(target, way, operands)]
            for index, (way, operands) in enumerate(ways[:MOST_WAYS]):
                add(
                    f"table {name} {place}.{index}",
                    lambda *xs, way=way, target=target: way(target, *xs),
                    *operands,
                    data=True,  # they work with other numbers, in rows
                )


with warnings.catch_warnings(action="ignore"):
    logging.disable(logging.WARNING)
    try:
        _file()
    finally:
        logging.disable(logging.NOTSET)
