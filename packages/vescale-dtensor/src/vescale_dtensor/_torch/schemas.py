"""Reads torch's schemas: names of a function's arguments, and which of them it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vescale_comm.nested import tensors_within

from vescale_dtensor._torch.compat import name_of_overload, overloads_of


class OverloadArguments(NamedTuple):
    """The arguments of one overload.

    Attributes:
        positional: names of those that may be given by position, in order.
        names: names of all.
        needed: names of those that have no default.
        written: names of those that the function writes: `Tensor(a!)`, `Tensor(a!)[]`.
        flags: names of those that are booleans.
    """

    positional: tuple[str, ...]
    names: frozenset[str]
    needed: frozenset[str]
    written: frozenset[str]
    flags: frozenset[str]

    def takes(self, given: int, named: Iterable[str]) -> bool:
        """Whether a call with `given` positional and these named arguments may be meant for it."""
        taken = self.positional[:given]
        # Loops here and below: until 3.12 each comprehension is a call, and a first call of any
        # function of torch comes here for each of its overloads.
        for name in named:
            if name not in self.names or name in taken:
                return False
        return len(taken) == given


# Schemas are parsed once per function: this is asked while a call is planned.
@lru_cache(maxsize=4096)
def signatures(func: Any) -> tuple[OverloadArguments, ...]:
    """Return the signatures of all overloads that take tensors; none for Python functions.

    torch's C++ functions are the ops of the same name; the argument that ops call `self` they call
    `input`.
    """
    own = "self"
    found = overloads_of(func)
    if isinstance(func, BuiltinFunctionType | MethodDescriptorType):
        own, found = "input", overloads_of(getattr(torch.ops.aten, func.__name__, None))
    method = isinstance(func, MethodDescriptorType)
    made = []
    for schema in found:
        # Without its name, `add.Tensor`, and its results. The other overloads are TorchScript's,
        # for numbers and lists.
        arguments = str(schema).partition("(")[2].partition("->")[0]
        if "Tensor" in arguments:
            made.append(_signature(schema, own, method))
    return tuple(made)


def _signature(schema: Any, own: str, method: bool) -> OverloadArguments:
    """Read one schema; `own` is what its argument `self` is called."""
    positional: list[str] = []
    names, needed, written, flags = set(), set(), set(), set()
    # One loop for all five: a first call of any function of torch reads a few such schemas.
    for argument in schema.arguments:
        name = own if argument.name == "self" else argument.name
        names.add(name)
        if not argument.kwarg_only:
            positional.append(name)
        if not argument.has_default_value():
            needed.add(name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.add(name)
        if str(argument.type) == "bool":
            flags.add(name)
    if method and own in positional:
        # `x.where(condition, other)`, of which the op is `where(condition, x, other)`
        positional.remove(own)
        positional.insert(0, own)
    sets = frozenset(names), frozenset(needed), frozenset(written), frozenset(flags)
    return OverloadArguments(tuple(positional), *sets)


def refuses_flags(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether no overload takes a call, since each gets something else for one of its booleans.

    Torch's parser refuses `keepdim=1`. A local kernel in its place would not.
    """
    if not isinstance(func, BuiltinFunctionType | MethodDescriptorType):
        return False  # registered ops take 1 for True
    # Of two tensors torch's parser itself refuses one that should be a boolean, before a rule sees
    # it. So the first `add` need not read schemas, which is a third of what it takes.
    if (not kwargs and len(args) <= 2) or isinstance(func, BuiltinFunctionType):
        tensors = all([isinstance(value, Tensor) for value in args])
        # Nor of a function: methods are looked up before that parser (`_fast_path/methods.py`).
        if tensors and all([type(value) is bool for value in kwargs.values()]):
            return False
    return wrong_flags(func, args, kwargs)


def wrong_flags(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether each overload that may be meant gets something else for one of its booleans."""
    refused = False
    for signature in signatures(func):
        if not signature.takes(len(args), kwargs):
            continue
        for name, value in (*zip(signature.positional, args, strict=False), *kwargs.items()):
            if name in signature.flags and not isinstance(value, bool):
                refused = True
                break
        else:
            return False  # this overload takes the call
    return refused


def written_operands(
    func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> set[int] | None:
    """Return the indices, among the tensors of a call, of those that its schema says it writes.

    Returns:
        None if there is no schema to ask.
    """
    fitting = [s for s in signatures(func) if _complete(s, len(args), kwargs)]
    if not fitting:
        return None
    # Overloads that fit the same names differ in the types of arguments, and write the same ones.
    written = frozenset().union(*(s.written for s in fitting))
    found: set[int] = set()
    at = 0
    names = fitting[0].positional[: len(args)]
    for name, value in (*zip(names, args, strict=True), *kwargs.items()):
        # Counted as `tensors_within` lists them: that is how operands are numbered.
        count = len(tensors_within(value))
        if name in written:
            found.update(range(at, at + count))
        at += count
    return found


def in_signature_order(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the tensors of a call that dispatch has sorted are known to be in order.

    They are not where names fit no schema, as those of deprecated forms do. A function written in
    Python has sorted its arguments itself.
    """
    named = any(tensors_within(value) for value in kwargs.values())
    known = signatures(func) if named else ()
    return not known or any(s.takes(len(args), kwargs) for s in known)


def _complete(signature: OverloadArguments, given: int, kwargs: dict[str, Any]) -> bool:
    """Whether a call with these arguments fits the signature and lacks none that it needs."""
    if not signature.takes(given, kwargs):
        return False
    return signature.needed <= {*signature.positional[:given], *kwargs}


def without_out(func: Any, given: int, kwargs: dict[str, Any]) -> Any:
    """Return the function that computes the result of a call that has `out=` without writing it.

    torch's own functions do so if `out=` is left out. Of `torch.ops`, an overload with `out`
    requires it, and another overload of the same name returns the result; custom ops may have none.

    Returns:
        None if there is no such function.
    """
    rest = {name: value for name, value in kwargs.items() if name != "out"}
    name = name_of_overload(func)
    if name is None:
        return func
    return name if any(_complete(s, given, rest) for s in signatures(name)) else None
