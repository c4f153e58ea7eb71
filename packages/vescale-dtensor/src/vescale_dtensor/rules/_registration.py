"""`register_rule`: finds the function objects that a rule answers for, and refuses useless rules.

A rule is useless if torch never passes the function to DTensors, or if the rule does not know that
the function writes to an operand. Both would go unnoticed later, so they are errors here.
"""

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
    """Set the rule for calls of a function with DTensors, from the next call on.

    Args:
        func: the function as users call it: of torch (`torch.hypot`; a method is another function,
            `torch.Tensor.hypot`), a custom operator (what `torch.library.custom_op` returned,
            `torch.ops.mylib.myop`, or an overload of it: one rule serves all three forms), or a
            Python function that asks for overrides with `torch.overrides.handle_torch_function`.
        rule: how to plan its calls; see `Rule`.
        replace: whether it may replace a rule or handler that the function has already.

    Raises:
        RuleError: no rule could answer for `func`; `rule` is no `Rule`, has a field of a wrong
            type, or does not say that `func` writes to an operand; or `func` has a rule or handler
            and `replace` is False. Nothing has changed then.

    Examples:
        register_rule(torch.ops.mylib.scale, Rule("scale", scale_strategy, reads=Reads.NOTHING))
    """
    _check_rule(func, rule)
    # All are checked before one is set, so that an error changes nothing.
    named = functions_of(func)
    for each in named:
        _check_function(each, replace)
        _check_writes(each, rule)
    for each in named:
        registry.set_rule(each, rule)


def functions_of(func: Any) -> list[Any]:
    """Every function object that torch may pass to `__torch_function__` for a call of `func`.

    A custom operator has three: what `custom_op` returned calls its one overload, and users may
    call that, or the packet of all overloads.
    """
    overload = overload_of_custom_op(func)
    if overload is not None:
        func = overload
    if isinstance(func, _PACKET):
        return [func, *(getattr(func, name) for name in func.overloads())]
    if isinstance(func, _OVERLOAD):
        packet = func.overloadpacket
        # A packet of several overloads also stands for those for which this rule need not hold.
        return [func, packet] if len(packet.overloads()) == 1 else [func]
    return [func]


def _check_rule(func: Any, rule: Any) -> None:
    """Refuse what is no `Rule`, with a hint for the usual mistakes.

    Raises:
        RuleError: it is none, or has a field of a wrong type.
    """
    if isinstance(rule, Rule):
        _check_fields(rule)
        return
    if isinstance(func, Rule):
        raise RuleError(
            "register_rule got the rule first: it is register_rule(function, rule), "
            f"so here register_rule({_text_of(rule)}, {func.name!r} …)"
        )
    if isinstance(rule, Signature):
        hint = "a Signature: make it Rule('name', lambda call: signature.strategy())"
    elif isinstance(rule, Strategy):
        hint = "a Strategy: make it Rule('name', lambda call: strategy)"
    elif callable(rule):
        hint = f"{_text_of(rule)}: make it Rule('name', {_text_of(rule)})"
    else:
        hint = f"{rule!r} of type {type(rule).__name__}"
    raise RuleError(f"register_rule({_text_of(func)}, …): expected a Rule, found {hint}")


def _check_fields(rule: Rule) -> None:
    """Refuse a rule with a field of a wrong type: a dataclass takes anything.

    Raises:
        RuleError: there is one.
    """
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
    """Refuse a function that no rule could answer for, or that has a rule and may not get another.

    Raises:
        RuleError: it is one.
    """
    problem = _why_never_asked(func)
    if problem:
        raise RuleError(f"register_rule({_text_of(func)}, …): {problem}")
    if not replace and (func in registry.known_rules() or func in registry.handlers):
        raise RuleError(
            f"register_rule({function_name(func)}, …, replace=False): something answers for it "
            "already, and it may not be replaced"
        )


def _check_writes(func: Any, rule: Rule) -> None:
    """Refuse a rule for an operator that writes to operands, if the rule does not say so.

    The operator would write to a redistributed copy, and the write would be lost.

    Raises:
        RuleError: it is one.
    """
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
    """Why torch would never pass a call of `func` to a rule, in words; empty if it would."""
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
    """Whether a function is one of torch's, or known here, so that torch passes its calls on."""
    # Methods of tensors and getters of their properties have no module, but a class.
    owner = getattr(func, "__objclass__", None) or getattr(func, "__self__", None)
    named = str(getattr(func, "__module__", None) or getattr(owner, "__module__", ""))
    known = isinstance(func, _PACKET | _OVERLOAD) or func in registry.known_rules()
    return (
        known or named.split(".")[0] == "torch" or getattr(owner, "__objclass__", None) is not None
    )


def _asks_for_overrides(func: FunctionType) -> bool:
    """Whether a Python function, or what it wraps, calls `handle_torch_function`."""
    # By name in its code: calling it to find out would need arguments.
    code = inspect.unwrap(func).__code__
    names = {*func.__code__.co_names, *func.__code__.co_freevars, *code.co_names}
    return "handle_torch_function" in names


def _text_of(value: Any) -> str:
    return function_name(value) if callable(value) else repr(value)
