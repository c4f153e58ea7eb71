"""How cases are filed: a name, what to call, and the kinds of its operands."""

from __future__ import annotations

from rule_fuzz import Op, T

CASES: dict[str, Op] = {}

A, B, C, E = T((5, 4)), T((4,)), T((5, 1)), T((3, 5, 4))
P = T((5, 4), "p")
D = T((5, 4), "d")
WHOLE, ROW = T((5, 4), "i", low=1), T((4,), "i", low=1)
BOOL = T((5, 4), "b")
N = T(())


def add(name, call, *operands, **options):
    assert name not in CASES, name
    CASES[name] = Op(call, operands, **options)


def each(prefix, calls, *operands, **options):
    for index, call in enumerate(calls):
        add(f"{prefix}{index}", call, *operands, **options)
