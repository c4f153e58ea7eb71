"""The slow path: one torch function call with DTensors → its handler, its plan, or the fallback.

Read it from `dispatch` down. The fast path (`_fast_path`) compiles what is decided here, so that
an equal call does not come here again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vescale_dtensor._dispatch.argument_names import named_as_torch_does
from vescale_dtensor._dispatch.execute import execute
from vescale_dtensor._dispatch.fallback import fallback, run_replicated
from vescale_dtensor._dispatch.mutate import mutate_via_copy
from vescale_dtensor._dispatch.observers import observed
from vescale_dtensor._dispatch.out_argument import call_with_out
from vescale_dtensor._dispatch.plan_cache import plan_for, write_layout
from vescale_dtensor._dispatch.registry import handlers, rule_for
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import Rule, function_name
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.observers import observers
from vescale_dtensor._torch.compat import is_traced
from vescale_dtensor._torch.pytree import tensors_within
from vescale_dtensor._torch.scalars import with_python_numbers

# Where torch keeps what talks to other ranks, as functions and as registered ops. The fallback
# would run those on wholes, and hand out what differs from rank to rank as if it were the same.
_COMMUNICATING = (
    "torch.distributed",
    "torch._ops.c10d",
    "torch._ops._c10d_functional",
    "torch._ops._dtensor",
    "torch._ops.symm_mem",
)


def dispatch(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a torch function that was called with a DTensor among its arguments."""
    if kwargs:
        args, kwargs = named_as_torch_does(func, args, kwargs)
    given = args
    args, kwargs = with_python_numbers(func, args, kwargs)
    if args is not given and not _any_wrapper(args, kwargs):
        return func(*args, **kwargs)  # a plain tensor, whose size alone was a DTensor
    if observers:
        return observed(_answer, func, args, kwargs)
    return _answer(func, args, kwargs)


def _answer(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    handler = handlers.get(func)
    if handler is not None:
        return handler(*args, **kwargs)
    if is_traced():
        raise UnsupportedError(
            f"{function_name(func)} on a DTensor under make_fx, torch.export or torch.jit.trace: "
            "the graph would hold this rank's data as if it were global. Trace a function of local "
            "tensors."
        )
    if kwargs.get("out") is not None:
        return call_with_out(func, args, kwargs, compute)
    return run_by_rule(func, args, kwargs)


def run_by_rule(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call by the function's rule, whoever handles it; or by the fallback."""
    rule = rule_for(func, args, kwargs)
    if rule is None:
        _refuse_raw_communication(func)
        return fallback(func, args, kwargs)
    return by_rule(rule, func, args, kwargs)


def by_rule(rule: Rule, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call by this rule, or by the fallback where it does not hold."""
    call = OpCall(func, args, kwargs, rule.reads)
    plan = plan_for(call, rule)
    return _without_plan(call, rule) if plan is None else execute(plan, call)


def _without_plan(call: OpCall, rule: Rule) -> Any:
    """What is written in place may be written as a copy that lies otherwise; else the fallback."""
    layout = None if rule.writes is None else write_layout(call, rule)
    if layout is None or rule.writes is None:
        return run_replicated(call)
    return mutate_via_copy(call, rule.writes, layout)


def compute(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call that may have no DTensor left among its arguments."""
    wrapped = _any_wrapper(args, kwargs)
    return dispatch(func, args, kwargs) if wrapped else func(*args, **kwargs)


def _any_wrapper(args: Any, kwargs: dict[str, Any]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors_within((args, kwargs)))


def _refuse_raw_communication(func: Callable[..., Any]) -> None:
    if str(getattr(func, "__module__", "")).startswith(_COMMUNICATING):
        raise UnsupportedError(
            f"{function_name(func)} was called with a DTensor. Collectives move local data: call "
            "it on x.to_local(), or use x.redistribute()."
        )
