"""`F.relu(x, inplace=True)` and its kin: the flag decides which of two rules holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F

from vescale_dtensor._call import Call, Reads
from vescale_dtensor._dispatch import plan_for, rule_of
from vescale_dtensor._execute import execute
from vescale_dtensor._fallback import run_replicated
from vescale_dtensor._plan import Rule

_NAMES = """
relu relu6 leaky_relu elu celu selu hardtanh hardswish hardsigmoid silu mish threshold
"""


def _flagged(func: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of an activation with an `inplace` flag."""
    position = list(inspect.signature(func).parameters).index("inplace")
    writing = partial(func, inplace=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        inplace = args[position] if len(args) > position else kwargs.pop("inplace", False)
        chosen = writing if inplace else func
        rule = _writing_rule(func) if inplace else rule_of(func)
        call = Call(chosen, args[:position], kwargs, rule.reads)
        plan = plan_for(call, rule)
        return run_replicated(call) if plan is None else execute(plan, call)

    return run


def _writing_rule(func: Callable[..., Any]) -> Rule:
    return Rule("pointwise in place", rule_of(func).strategy, Reads.EXTENTS, writes=0)


HANDLERS: dict[Any, Callable[..., Any]] = {
    getattr(F, name): _flagged(getattr(F, name)) for name in _NAMES.split()
}
