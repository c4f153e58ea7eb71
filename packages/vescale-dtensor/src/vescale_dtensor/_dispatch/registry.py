"""Which rule or handler answers for a torch function, and who is told when that changes.

Two tables, filled by `_ops` at import and by users through `rules.register_rule`:

- a *rule* describes an operator on data: the planner turns it into a plan;
- a *handler* is a function that takes the place of the whole call.

Caches hold what followed from these tables, so each of them subscribes with `on_change`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from vescale_dtensor._errors import RuleError
from vescale_dtensor._planning.op_call import Reads
from vescale_dtensor._planning.plan import Rule, function_name
from vescale_dtensor._torch.bounded_cache import Subscribers

_rules: dict[Any, Rule] = {}
# Read on the fast path, without a call: these three are public to the package.
handlers: dict[Any, Callable[..., Any]] = {}
# Handlers whose answer, for one argument, follows from its spec.
constants: set[Any] = set()
# Functions whose rule does not read numbers: a learning rate must not make a key of its own.
scalar_agnostic: set[Any] = set()
# Handled functions that are no operation on data, so that no rule could ever answer for them.
not_operators: set[Any] = set()
# Caches hold what followed from the tables as they were: each subscribes with what empties it.
on_change = Subscribers()


def set_rule(func: Callable[..., Any], rule: Rule) -> None:
    """Let this rule answer for a function, in place of the rule that did.

    A handler that stands beside a rule asks for it; one that stands alone would never, so it goes.
    """
    if func not in _rules and handlers.pop(func, None) is not None:
        constants.discard(func)
    _store_rule(func, rule)
    on_change.notify()


def install(
    rules: Mapping[Any, Rule],
    new_handlers: Mapping[Any, Callable[..., Any]],
    *,
    constant: Collection[Any] = (),
    operators: bool = True,
) -> None:
    """Add what a family of this package defines: nothing of it may be known yet.

    Args:
        rules: function -> rule.
        new_handlers: function -> what takes the place of the whole call.
        constant: functions whose handler answers from the spec of one argument alone.
        operators: whether the handled functions are operations on data.

    Raises:
        RuleError: a second rule, or a second handler, for one function. Which of the two answers
            would depend on the order of imports.
    """
    for func in (f for new, known in ((rules, _rules), (new_handlers, handlers)) for f in new
                 if f in known):  # fmt: skip
        raise RuleError(f"{function_name(func)} has two rules or two handlers; keep one of them")
    for func, rule in rules.items():
        _store_rule(func, rule)
    handlers.update(new_handlers)
    constants.update(func for func in new_handlers if func in constant)
    not_operators.update(() if operators else new_handlers)
    on_change.notify()


def _store_rule(func: Callable[..., Any], rule: Rule) -> None:
    _rules[func] = rule
    variants = (rule,) if rule.writing is None else (rule, rule.writing)
    if any(variant.reads & Reads.NUMBERS for variant in variants):
        scalar_agnostic.discard(func)
    else:
        scalar_agnostic.add(func)


def rule_for(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Rule | None:
    """The rule for a call: where the function has an `inplace` flag, that decides which."""
    rule = _rules.get(func)
    if rule is None or rule.flag is None:
        return rule
    flagged = args[rule.flag] if len(args) > rule.flag else kwargs.get("inplace", False)
    return rule.writing if flagged else rule


def rule_of(func: Callable[..., Any]) -> Rule:
    """The rule of a function that has one."""
    return _rules[func]


def known_rules() -> dict[Any, Rule]:
    """A copy of the rule table."""
    return dict(_rules)


def known_handlers() -> dict[Any, Callable[..., Any]]:
    """A copy of the table of handlers."""
    return dict(handlers)
