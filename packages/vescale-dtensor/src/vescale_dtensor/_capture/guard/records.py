"""Objects among arguments and results, taken apart: a batch object is its fields.

torch's pytree knows lists, tuples, dicts and what is registered with it. Any other object of a
class that users wrote (a dataclass, one with slots, a simple namespace) is a leaf there. Here it
is a record: a leaf, followed by the values of its attributes, which may be records again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vescale_dtensor._capture.guard.kinds import kind_of_class, namespace_of, slots_of
from vescale_dtensor._capture.guard.places import MISSING


@dataclass(frozen=True)
class Record:
    """A record among leaves.

    Attributes:
        index: of the leaf.
        cls: its class.
        names: of its attributes, in the order in which they were set.
        form: of their values; None for a record that came before.
        count: how many leaves the values are.
    """

    index: int
    cls: type
    names: tuple[str, ...]
    form: Form | None
    count: int


@dataclass(frozen=True)
class RecordForm:
    """How flat values are put together where some are records."""

    spec: TreeSpec
    records: tuple[Record, ...]


Form = TreeSpec | RecordForm
"""How flat values are put together."""


_MADE_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def is_record(value: Any) -> bool:
    """Whether an object is nothing but its attributes."""
    cls = type(value)
    # Whatever can be called is compared as one object: code may run in it, so it is more than its
    # attributes.
    return kind_of_class(cls) == "object" and not issubclass(cls, nn.Module) and not callable(value)


def flatten(tree: Any) -> tuple[list[Any], Form]:
    """The leaves of a tree, records and their values among them, and how to put it together."""
    return _flatten(tree, set())


def _flatten(tree: Any, seen: set[int]) -> tuple[list[Any], Form]:
    """`flatten`, with the ids of the records that were met already."""
    leaves, spec = tree_flatten(tree, is_leaf=_has_more_than_items)
    if not any(map(is_record, leaves)):
        return leaves, spec
    flat: list[Any] = []
    records = []
    for index, leaf in enumerate(leaves):
        flat.append(leaf)
        if not is_record(leaf):
            continue
        # Ids are safe while this runs: the caller holds the tree.
        if id(leaf) in seen:  # a cycle, or one object twice
            records.append(Record(index, type(leaf), (), None, 0))
            continue
        seen.add(id(leaf))
        # Without properties and `__getattr__`, which are code of the user's.
        attributes = attributes_of(leaf)
        values, form = _flatten(list(attributes.values()), seen)
        records.append(Record(index, type(leaf), tuple(attributes), form, len(values)))
        flat += values
    return flat, RecordForm(spec, tuple(records))


def _has_more_than_items(value: Any) -> bool:
    """Whether a node has attributes of its own: its items alone would not make it again."""
    derived = isinstance(value, tuple) and type(value) is not tuple
    # torch's pytree knows no other class whose objects have room for them.
    return (derived or type(value) is OrderedDict) and bool(attributes_of(value))


def unflatten(flat: list[Any], form: Form) -> Any:
    """A tree of leaves; every record in it is made anew."""
    if isinstance(form, TreeSpec):
        return tree_unflatten(flat, form)
    records = {record.index: record for record in form.records}
    leaves, start = [], 0
    for index in range(form.spec.num_leaves):
        record = records.get(index)
        leaf, start = flat[start], start + 1
        if record is not None and record.form is not None:
            values = unflatten(flat[start : start + record.count], record.form)
            start += record.count
            # Else it is an object from outside, or an argument, and is returned itself.
            if leaf is MISSING:
                leaf = _made(record, values)
        leaves.append(leaf)
    return tree_unflatten(leaves, form.spec)


def _made(record: Record, values: list[Any]) -> Any:
    """A new object with these attributes."""
    # As copying and unpickling do: __init__ may ask for other arguments, and count its calls.
    cls: Any = record.cls
    # By the first class that Python code has not made: `SimpleNamespace` is not made by `object`.
    root: Any = next(base for base in cls.__mro__ if not base.__flags__ & _MADE_IN_PYTHON)
    made = root.__new__(cls)
    for name, value in zip(record.names, values, strict=True):
        # Not by the class: frozen dataclasses refuse, others may run code.
        object.__setattr__(made, name, value)
    return made


def attributes_of(value: Any) -> dict[str, Any]:
    """All attributes that an object itself has."""
    found = {}
    for name, slot in slots_of(type(value)).items():
        try:
            found[name] = slot.__get__(value, type(value))
        except AttributeError:
            continue
    return found | (namespace_of(value) or {})
