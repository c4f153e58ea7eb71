"""Which rule or handler answers for a torch function, and who is told when that changes.

Two tables, filled by `_ops` at import and by users through `register_rule`:

- a *rule* describes an operator on data: the planner turns it into a plan;
- a *handler* is a function that takes the place of the whole call.

Caches hold what followed from these tables, so each of them subscribes with `on_change`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vescale_dtensor._planning.op_call import Reads
from vescale_dtensor._planning.plan import Rule
from vescale_dtensor._torch.bounded_cache import Subscribers

_rules: dict[Any, Rule] = {}
# Read on the fast path, without a call: these three are public to the package.
handlers: dict[Any, Callable[..., Any]] = {}
# Handlers whose answer, for one argument, follows from its spec.
constants: set[Any] = set()
# Functions whose rule does not read numbers: a learning rate must not make a key of its own.
scalar_agnostic: set[Any] = set()
# Caches hold what followed from the tables as they were: each subscribes with what empties it.
on_change = Subscribers()


def register_rule(func: Callable[..., Any], rule: Rule) -> None:
    """Teach a rule for a torch function (or a custom op), in place of what is known.

    Args:
        func: the function object, as torch hands it to `__torch_function__`.
        rule: see `Rule`.
    """
    _rules[func] = rule
    variants = (rule,) if rule.writing is None else (rule, rule.writing)
    if any(variant.reads & Reads.NUMBERS for variant in variants):
        scalar_agnostic.discard(func)
    else:
        scalar_agnostic.add(func)
    on_change.notify()


def register_handler(
    func: Callable[..., Any], handler: Callable[..., Any], constant: bool = False
) -> None:
    """Let `handler(*args, **kwargs)` take the place of a function.

    Where it is `constant`, the answer for one argument depends on its shape and dtype only.
    """
    handlers[func] = handler
    if constant:
        constants.add(func)
    on_change.notify()


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
