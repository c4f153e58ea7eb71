"""The registry of rules and handlers of torch functions, and of caches that depend on them.

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
# The fast path reads these three directly, as a call would cost too much there.
handlers: dict[Any, Callable[..., Any]] = {}
# Functions whose handler answers from the spec of its one argument alone.
constants: set[Any] = set()
# Functions whose rule reads no numbers: a learning rate must not become part of a key.
scalar_agnostic: set[Any] = set()
# Functions whose rule reads how ranks share attention: that becomes part of a key.
reads_way: set[Any] = set()
# Functions with a handler that are no operation on data, so that no rule could answer for them.
not_operators: set[Any] = set()
# Every cache of plans or compiled calls subscribes with the function that empties it.
on_change = Subscribers()


def set_rule(func: Callable[..., Any], rule: Rule) -> None:
    """Set the rule of a function, in place of an earlier one, and empty all caches.

    Args:
        func: the torch function.
        rule: its rule.
    """
    # A handler of a function that has a rule ends in that rule. A handler without one never asks
    # for a rule, so the new rule would have no effect beside it.
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
    """Add the rules and handlers of a family of this package.

    Args:
        rules: function -> rule.
        new_handlers: function -> what takes the place of the whole call.
        constant: functions whose handler answers from the spec of one argument alone.
        operators: whether the handled functions are operations on data.

    Raises:
        RuleError: a second rule, or a second handler, for one function: which of the two answers
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
    """Store a rule, and whether it reads numbers and the way of attention."""
    _rules[func] = rule
    variants = (rule,) if rule.writing is None else (rule, rule.writing)
    if any(variant.reads & Reads.NUMBERS for variant in variants):
        scalar_agnostic.discard(func)
    else:
        scalar_agnostic.add(func)
    if any(variant.reads & Reads.ATTENTION_WAY for variant in variants):
        reads_way.add(func)
    else:
        reads_way.discard(func)


def rule_for(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Rule | None:
    """The rule for a call; None: there is none. An `inplace` argument decides which of two."""
    rule = _rules.get(func)
    if rule is None or rule.flag is None:
        return rule
    flagged = args[rule.flag] if len(args) > rule.flag else kwargs.get("inplace", False)
    return rule.writing if flagged else rule


def rule_of(func: Callable[..., Any]) -> Rule:
    """The rule of a function that has one.

    Raises:
        KeyError: it has none.
    """
    return _rules[func]


def has_entry(func: Any) -> bool:
    """Whether a function has a rule or a handler."""
    return func in _rules or func in handlers


def known_rules() -> dict[Any, Rule]:
    """A copy of the rule table."""
    return dict(_rules)


def known_handlers() -> dict[Any, Callable[..., Any]]:
    """A copy of the table of handlers."""
    return dict(handlers)
