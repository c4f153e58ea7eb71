"""The slow path: one torch function call with DTensors → its handler, its plan, or the fallback.

Read it from `dispatch` down. The fast path (`_fast_path`) compiles what is decided here, so that
an equal call does not come here again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vescale_comm.nested import tensors_within

from vescale_dtensor._dispatch.argument_names import named_as_torch_does
from vescale_dtensor._dispatch.execute import execute
from vescale_dtensor._dispatch.fallback import fallback, run_replicated
from vescale_dtensor._dispatch.mutate import mutate_via_copy
from vescale_dtensor._dispatch.observers import observed
from vescale_dtensor._dispatch.one_mesh import on_one_mesh
from vescale_dtensor._dispatch.operators import as_function
from vescale_dtensor._dispatch.out_argument import call_with_out
from vescale_dtensor._dispatch.plan_cache import plan_for, write_layout
from vescale_dtensor._dispatch.registry import handlers, rule_for
from vescale_dtensor._dispatch.written_views import write_through
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import Rule, SeveralSpellingsError, function_name
from vescale_dtensor._tensor.copied_views import any_copies
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.lineage import marked
from vescale_dtensor._tensor.observers import observers
from vescale_dtensor._torch.call_site import call_site, integration
from vescale_dtensor._torch.compat import is_traced
from vescale_dtensor._torch.scalars import with_python_numbers

# Modules of functions and registered ops that communicate. The fallback would run them on
# replicated operands, and return what may differ from rank to rank as if it were replicated.
_COMMUNICATING = (
    "torch.distributed",
    "torch._ops.c10d",
    "torch._ops._c10d_functional",
    "torch._ops._dtensor",
    "torch._ops.symm_mem",
)


def dispatch(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a torch function that was called with a DTensor among its arguments.

    Args:
        func: the torch function.
        args: its arguments by position.
        kwargs: its arguments by name.

    Returns:
        What `func` returns on one device, with DTensors for tensors.
    """
    if kwargs:
        args, kwargs = named_as_torch_does(func, args, kwargs)
    given = args
    args, kwargs = with_python_numbers(func, args, kwargs)
    if args is not given and not _any_wrapper(args, kwargs):
        return func(*args, **kwargs)  # of a plain tensor: only a size was a DTensor, now a number
    if observers:
        return marked(lambda *a, **k: observed(_answer, func, a, k), func, args, kwargs)
    return marked(lambda *a, **k: _answer(func, a, k), func, args, kwargs)


def _answer(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call by its handler, its rule, or the fallback.

    Raises:
        UnsupportedError: a tracer would record local data as global.
    """
    written = write_through(func, args, kwargs) if any_copies() else None
    if written is not None:
        return written[0]
    handler = handlers.get(func)
    if handler is not None:
        return handler(*args, **kwargs)
    # After the handlers: questions about shape or dtype may be answered while tracing.
    if is_traced():
        raise UnsupportedError(
            f"{function_name(func)} on a DTensor under make_fx, torch.export or torch.jit.trace: "
            "the graph would hold this rank's data as if it were global. Trace a function of local "
            "tensors."
        )
    if kwargs.get("out") is not None:
        return call_with_out(func, args, kwargs, compute)
    return _by_rule_or_fallback(func, args, kwargs)


def run_by_rule(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call by the function's rule, or by the fallback. Handlers use it: it calls none."""
    # The fast path calls handlers without asking.
    written = write_through(func, args, kwargs) if any_copies() else None
    return _by_rule_or_fallback(func, args, kwargs) if written is None else written[0]


def _by_rule_or_fallback(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    rule = rule_for(func, args, kwargs)
    if rule is None:
        function = as_function(func)
        if function is not None:
            return function(*args, **kwargs)
        refuse_raw_communication(func)
        return fallback(func, args, kwargs)
    return by_rule(rule, func, args, kwargs)


def by_rule(rule: Rule, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call by this rule, or by the fallback if the rule does not hold for it."""
    call = OpCall(func, args, kwargs, rule.reads)
    try:
        plan = plan_for(call, rule)
    except SeveralSpellingsError:
        return by_rule(rule, func, *on_one_mesh(call, rule))
    return _without_plan(call, rule) if plan is None else execute(plan, call)


def _without_plan(call: OpCall, rule: Rule) -> Any:
    """Run a call that has no plan: an in-place op on a copy in another layout, or the fallback."""
    layout = None if rule.writes is None else write_layout(call, rule)
    if layout is None or rule.writes is None:
        return run_replicated(call)
    return mutate_via_copy(call, rule.writes, layout)


def compute(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call that may have no DTensor left among its arguments (`out=` was the only one)."""
    wrapped = _any_wrapper(args, kwargs)
    return dispatch(func, args, kwargs) if wrapped else func(*args, **kwargs)


def _any_wrapper(args: Any, kwargs: dict[str, Any]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors_within((args, kwargs)))


def refuse_raw_communication(func: Callable[..., Any]) -> None:
    """Refuse functions of torch.distributed.

    Raises:
        UnsupportedError: it is one.
    """
    if str(getattr(func, "__module__", "")).startswith(_COMMUNICATING):
        raise UnsupportedError(
            f"{function_name(func)} was called with a DTensor by {call_site()}. A DTensor is "
            "global already: added up or collected over the ranks, it would count once for each. "
            "Leave the call out (torchmetrics: sync_on_compute=False). To communicate yourself, "
            "call it on x.to_local(), this rank's part; x.redistribute() changes the layout."
            f"{integration()}"
        )
