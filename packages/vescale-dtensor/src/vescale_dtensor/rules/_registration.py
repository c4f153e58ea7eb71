"""`register_rule`: which function objects a rule answers for, and what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._dispatch import registry
from vescale_dtensor._errors import RuleError
from vescale_dtensor._planning.op_call import Reads
from vescale_dtensor._planning.plan import Rule, function_name
from vescale_dtensor._planning.strategy import Signature, Strategy
from vescale_dtensor._torch.compat import overload_of_custom_op, written_arguments

_OVERLOAD: Any = type(torch.ops.aten.add.Tensor)
_PACKET: Any = type(torch.ops.aten.add)
_KEYS = Reads.NUMBERS | Reads.SHAPES | Reads.BROADCAST_PATTERN


def register_rule(func: Any, rule: Rule, *, replace: bool = True) -> None:
    """Let a rule answer for calls of a function with DTensors, from the next call on.

    Args:
        func: the function as users call it: of torch (`torch.hypot`; a method is another function,
            `torch.Tensor.hypot`), a custom operator (what `torch.library.custom_op` returned,
            `torch.ops.mylib.myop`, or an overload of it: one rule serves all three forms), or a
            Python function that asks for overrides with `torch.overrides.handle_torch_function`.
        rule: what is known of the function; see `Rule`.
        replace: whether it may take the place of what answers for the function today.

    Raises:
        RuleError: `func` is nothing that a rule could answer for; `rule` is no `Rule` or has a
            field of a wrong type, or does not say that `func` writes to an operand; or `func` is
            known and `replace` is off. Nothing has changed.

    Example:
        register_rule(torch.ops.mylib.scale, Rule("scale", scale_strategy, reads=Reads.NOTHING))
    """
    _check_rule(func, rule)
    named = functions_of(func)
    for each in named:
        _check_function(each, replace)
        _check_writes(each, rule)
    for each in named:
        registry.set_rule(each, rule)


def functions_of(func: Any) -> list[Any]:
    """Every function object under which torch hands the calls of `func` to DTensors.

    A custom operator goes by three names: its definition calls the one overload, and users may call
    that, or the packet of all overloads.
    """
    overload = overload_of_custom_op(func)
    if overload is not None:
        func = overload
    if isinstance(func, _PACKET):
        return [func, *(getattr(func, name) for name in func.overloads())]
    if isinstance(func, _OVERLOAD):
        packet = func.overloadpacket
        # A packet of several overloads stands for others, too, for which this rule need not hold.
        return [func, packet] if len(packet.overloads()) == 1 else [func]
    return [func]


def _check_rule(func: Any, rule: Any) -> None:
    if isinstance(rule, Rule):
        _check_fields(rule)
        return
    if isinstance(func, Rule):
        raise RuleError(
            "register_rule got the rule first: it is register_rule(function, rule), "
            f"so here register_rule({_shown(rule)}, {func.name!r} …)"
        )
    if isinstance(rule, Signature):
        hint = "a Signature: make it Rule('name', lambda call: signature.strategy())"
    elif isinstance(rule, Strategy):
        hint = "a Strategy: make it Rule('name', lambda call: strategy)"
    elif callable(rule):
        hint = f"{_shown(rule)}: make it Rule('name', {_shown(rule)})"
    else:
        hint = f"{rule!r} of type {type(rule).__name__}"
    raise RuleError(f"register_rule({_shown(func)}, …): expected a Rule, found {hint}")


def _check_fields(rule: Rule) -> None:
    index = (int, type(None))
    expected: dict[str, tuple[Any, str]] = {
        "name": (str, "a string"),
        "strategy": (Callable, "a function of the call"),
        "reads": (int, "a combination of NUMBERS, SHAPES and BROADCAST_PATTERN of Reads"),
        "writes": (index, "the index of an operand, or None"),
        "views": (bool, "True or False"),
        "flag": (index, "the position of an argument, or None"),
    }
    for field in fields(rule):
        kind, words = expected.get(field.name, (object, ""))
        value = getattr(rule, field.name)
        if not isinstance(value, kind):
            raise RuleError(f"Rule {rule.name!r}: {field.name} is {value!r}; it has to be {words}")
    if rule.reads & ~_KEYS:
        words = expected["reads"][1]
        raise RuleError(f"Rule {rule.name!r}: reads is {rule.reads}; it has to be {words}")


def _check_function(func: Any, replace: bool) -> None:
    problem = _why_never_asked(func)
    if problem:
        raise RuleError(f"register_rule({_shown(func)}, …): {problem}")
    if not replace and (func in registry.known_rules() or func in registry.handlers):
        raise RuleError(
            f"register_rule({function_name(func)}, …, replace=False): something answers for it "
            "already, and it may not be replaced"
        )


def _check_writes(func: Any, rule: Rule) -> None:
    """A rule that does not know of a write would have a redistributed copy written, and lost."""
    written, returned = written_arguments(func)
    if not written or (rule.writes is not None and returned):
        return
    known = "it returns none of them" if rule.writes is not None else "the rule does not say so"
    raise RuleError(
        f"register_rule({function_name(func)}, …): the operator writes to {', '.join(written)} and "
        f"{known}. A rule serves what writes to one operand (Rule.writes) and returns it; without "
        "a rule the operands are replicated and written back, which is right."
    )


def _why_never_asked(func: Any) -> str:
    """Why torch would never hand a call of `func` to a DTensor; empty where it does."""
    if isinstance(func, str):
        return "a name is no function: pass the function itself, as in torch.ops.mylib.myop"
    if isinstance(func, type | torch.nn.Module):
        return "torch overrides functions, not classes or modules: register the one it calls"
    if not callable(func):
        return f"expected a function, found {func!r} of type {type(func).__name__}"
    if func in registry.not_operators:
        return "it is no operation on data (or is refused by design): nothing would ask a rule"
    if isinstance(func, MethodType):
        return "a bound method: torch hands over functions (torch.Tensor.add, not x.add)"
    if isinstance(func, BuiltinFunctionType) and isinstance(func.__self__, Tensor):
        return f"a method of one tensor: register torch.Tensor.{func.__name__}"
    if not isinstance(func, FunctionType):
        return "" if _is_of_torch(func) else "torch hands over functions and operators only"
    return "" if _is_of_torch(func) or _asks_for_overrides(func) else (
        "a Python function of your own, of which torch knows nothing. Register the operators that "
        "it calls, make it a torch.library.custom_op, or let it ask for overrides with "
        "torch.overrides.handle_torch_function"
    )  # fmt: skip


def _is_of_torch(func: Any) -> bool:
    # Methods of tensors and getters of their properties have no module, but a class.
    owner = getattr(func, "__objclass__", None) or getattr(func, "__self__", None)
    named = str(getattr(func, "__module__", None) or getattr(owner, "__module__", ""))
    known = isinstance(func, _PACKET | _OVERLOAD) or func in registry.known_rules()
    return (
        known or named.split(".")[0] == "torch" or getattr(owner, "__objclass__", None) is not None
    )


def _asks_for_overrides(func: FunctionType) -> bool:
    """Whether a Python function, or what it wraps, mentions torch's protocol."""
    code = inspect.unwrap(func).__code__
    names = {*func.__code__.co_names, *func.__code__.co_freevars, *code.co_names}
    return "handle_torch_function" in names


def _shown(value: Any) -> str:
    return function_name(value) if callable(value) else repr(value)
