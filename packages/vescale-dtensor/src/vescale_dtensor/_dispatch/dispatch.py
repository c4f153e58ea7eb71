"""Dispatch: one torch function call with DTensors → its handler, its plan, or the fallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.set_data import take_over
from vescale_dtensor._dispatch.execute import execute, like
from vescale_dtensor._dispatch.fallback import run_replicated
from vescale_dtensor._dispatch.mutate import other_layout, written_through
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._planning.op_call import Call, Reads, is_laid
from vescale_dtensor._planning.plan import Plan, Rule, build, function_name
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.observers import watched, watchers
from vescale_dtensor._torch.compat import is_traced
from vescale_dtensor._torch.opmath import autocast_off
from vescale_dtensor._torch.pytree import tensors_within
from vescale_dtensor._torch.scalars import with_python_numbers

# A plan, or why there is none under this key.
_BY_PROPORTIONS = object()
_FALLBACK = object()

# Where torch keeps what talks to other ranks, as functions and as registered ops. The fallback
# would run those on wholes, and hand out what differs from rank to rank as if it were the same.
_COMMUNICATING = (
    "torch.distributed",
    "torch._ops.c10d",
    "torch._ops._c10d_functional",
    "torch._ops._dtensor",
    "torch._ops.symm_mem",
)

_MOST_PLANS = 16384
_plans: dict[Any, Any] = {}
_rules: dict[Any, Rule] = {}
handlers: dict[Any, Callable[..., Any]] = {}
# Handlers whose answer, for one argument, follows from its spec.
constants: set[Any] = set()


def dispatch(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a torch function that was called with a DTensor among its arguments."""
    given = args
    args, kwargs = with_python_numbers(func, args, kwargs)
    if args is not given and not _any_wrapper(args, kwargs):
        return func(*args, **kwargs)  # a plain tensor, whose size alone was a DTensor
    if watchers:
        return watched(_answer, func, args, kwargs)
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
        return into(func, args, kwargs)
    return ruled(func, args, kwargs)


def ruled(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call by the function's rule, whoever handles it; or by the fallback."""
    rule = rule_for(func, args, kwargs)
    if rule is None:
        _refuse_raw_communication(func)
        return run_replicated(Call(func, args, kwargs, Reads.NOTHING))
    return by_rule(rule, func, args, kwargs)


def by_rule(rule: Rule, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call by this rule, or by the fallback where it does not hold."""
    call = Call(func, args, kwargs, rule.reads)
    plan = plan_for(call, rule)
    return _without_plan(call, rule) if plan is None else execute(plan, call)


def _without_plan(call: Call, rule: Rule) -> Any:
    """What is written in place may be written as a copy that lies otherwise; else the fallback."""
    if rule.writes is None:
        return run_replicated(call)
    key = (call.key, call.proportions(), "through")
    if key not in _plans:
        _make_room()
        layout = other_layout(call, build(call, rule, moves_target=True))
        _plans[key] = _FALLBACK if layout is None else layout
    layout = _plans[key]
    if layout is _FALLBACK:
        return run_replicated(call)
    return written_through(call, rule.writes, layout)


def plan_for(call: Call, rule: Rule) -> Plan | None:
    """The plan of a call, from the table or newly made; None where the fallback must serve."""
    known = _plans.get(call.key)
    if known is None:
        return _planned(call, rule)
    if known is _BY_PROPORTIONS:
        known = _plans.get((call.key, call.proportions()))
        if known is None:
            return _planned(call, rule)
    return None if known is _FALLBACK else known


def _planned(call: Call, rule: Rule) -> Plan | None:
    alike = rule.alike(call) if rule.alike is not None else None
    common = None if alike is None else (call.func, call.differentiable, alike[0])
    like = _plans.get(common)
    plan = build(call, rule) if like is None or alike is None else like.with_shape(alike[1])
    _make_room()
    if plan is None:
        _plans[call.key] = _FALLBACK
    elif plan.moves:
        _plans[call.key] = _BY_PROPORTIONS
        _plans[call.key, call.proportions()] = plan
    else:
        _plans[call.key] = plan
        if common is not None:
            _plans[common] = plan
    return plan


def _make_room() -> None:
    if len(_plans) >= _MOST_PLANS:
        # What a plan chooses follows from its key alone, so forgetting changes nothing but time.
        _plans.clear()


# They calculate in the dtype of `out`.
_AS_OUT = frozenset({"sum", "prod", "cumsum", "cumprod"})


def into(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """`out=`: compute, then write into what is given, which is returned."""
    out = kwargs["out"]
    if isinstance(out, Tensor) and not isinstance(out, DTensor) and not is_laid(out):
        return run_replicated(Call(func, args, kwargs, Reads.NOTHING))  # sparse results are plain
    del kwargs["out"]
    if getattr(func, "__name__", "") in _AS_OUT and isinstance(out, Tensor):
        kwargs.setdefault("dtype", out.dtype)
    with autocast_off(_device_type(out)):  # which torch's forms with `out` do not know
        wrapped = _any_wrapper(args, kwargs)
        result = dispatch(func, args, kwargs) if wrapped else func(*args, **kwargs)
    if isinstance(result, Tensor) and isinstance(out, Tensor):
        return _put(func, result, out)
    several = isinstance(result, list | tuple) and isinstance(out, list | tuple)
    if not several or len(result) != len(out):
        raise UnsupportedError(
            f"{function_name(func)}(out=…) with DTensor operands: out must be one tensor, or as "
            "many as there are results"
        )
    found = [_put(func, r, o) for r, o in zip(result, out, strict=True)]
    # As torch does: unbind_copy and split_with_sizes_copy return nothing then.
    return None if function_name(func).endswith("_copy") else like(result, found)


def _device_type(out: Any) -> str:
    first = out if isinstance(out, Tensor) else next(iter(out), None)
    return first.device.type if isinstance(first, Tensor) else "cpu"


def _put(func: Callable[..., Any], result: Tensor, out: Tensor) -> Tensor:
    """Write one result into one `out`, which torch resizes if it has no elements."""
    _check_out(func, result, out)
    if tuple(result.shape) == tuple(out.shape):
        return out.copy_(result)
    if out.numel() == 0 and isinstance(out, DTensor) and isinstance(result, DTensor):
        return take_over(out, result.to(out.dtype))
    if out.numel() == 0 and not isinstance(result, DTensor):
        return out.resize_(result.shape).copy_(result)
    raise UnsupportedError(
        f"{function_name(func)}(out=…): the result has the shape {tuple(result.shape)}, out "
        f"{tuple(out.shape)}; a DTensor is not resized"
    )


def _check_out(func: Callable[..., Any], result: Tensor, out: Tensor) -> None:
    """What torch itself refuses."""
    if not torch.can_cast(result.dtype, out.dtype):
        raise RuntimeError(
            f"{function_name(func)}(out=…): result type {result.dtype} can't be cast to {out.dtype}"
        )
    if torch.is_grad_enabled() and (result.requires_grad or out.requires_grad):
        raise RuntimeError(
            f"{function_name(func)}(out=…) does not support automatic differentiation, but one of "
            "the arguments requires grad"
        )


def _any_wrapper(args: Any, kwargs: dict[str, Any]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors_within((args, kwargs)))


def _refuse_raw_communication(func: Callable[..., Any]) -> None:
    if str(getattr(func, "__module__", "")).startswith(_COMMUNICATING):
        raise UnsupportedError(
            f"{function_name(func)} was called with a DTensor. Collectives move local data: call "
            "it on x.to_local(), or use x.redistribute()."
        )


def register_rule(func: Callable[..., Any], rule: Rule) -> None:
    """Teach a rule for a torch function (or a custom op), in place of what is known.

    Args:
        func: the function object, as torch hands it to `__torch_function__`.
        rule: see `Rule`.
    """
    from vescale_dtensor._fast_path.cache import clear

    _rules[func] = rule
    _plans.clear()
    clear()  # routes lead past the rules


def register_handler(
    func: Callable[..., Any], handler: Callable[..., Any], constant: bool = False
) -> None:
    """Let `handler(*args, **kwargs)` answer for a function that is no op on data.

    Where it is `constant`, the answer for one argument depends on its shape and dtype only.
    """
    handlers[func] = handler
    if constant:
        constants.add(func)


def plan_count() -> int:
    """How many plans the table holds: for tests that count misses."""
    return len(_plans)


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
