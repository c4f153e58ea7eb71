"""`__torch_function__`: maps (function, operand specs) to a compiled call.

Most calls of a model were seen before, and are answered by the call that `compile` made of the
first. Anything unusual goes to the slow path in `_dispatch`, which handles every case.

There are three ways to a compiled call, from cheap to general. All of them must build equal keys
for equal calls, or find nothing:

- `torch_function` looks up one DTensor, or two, without a loop: they are most of all calls, and
  half a microsecond matters to each;
- `_call_with_other` and its helpers do so for one DTensor and plain values, numbers or tensors;
- `_general_call` walks any arguments. Only it compiles what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch

from vescale_dtensor._autograd.conversion import as_replicated
from vescale_dtensor._autograd.function_results import note_plain_target
from vescale_dtensor._autograd.redistribution_cache import cached_total
from vescale_dtensor._dispatch.argument_names import named_as_torch_does
from vescale_dtensor._dispatch.dispatch import dispatch
from vescale_dtensor._dispatch.foreign_tensors import is_for_others
from vescale_dtensor._dispatch.one_mesh import on_one_mesh
from vescale_dtensor._dispatch.registry import (
    constants,
    handlers,
    reads_way,
    rule_for,
    scalar_agnostic,
)
from vescale_dtensor._fast_path.cache import (
    GRAD_IDLE,
    GRAD_RECORDED,
    IDLE_CALLS,
    NO_GRAD,
    CallTable,
)
from vescale_dtensor._fast_path.compile import compile_call, compile_constant
from vescale_dtensor._fast_path.keys import (
    GETITEM,
    NAMED,
    NUMBERS,
    TENSORS,
    are_values,
    exact_key,
    extend_key,
    index_key,
)
from vescale_dtensor._fast_path.tables import (
    table_for_operand,
    table_for_operands,
    table_of_three,
    table_of_two,
)
from vescale_dtensor._planning.attention_way import attention_way
from vescale_dtensor._planning.op_call import OpCall, Reads
from vescale_dtensor._planning.plan import SeveralSpellingsError
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.lineage import marked
from vescale_dtensor._tensor.observers import observers
from vescale_dtensor._torch.compat import (
    any_requires_grad,
    dispatch_modes,
    forward_grad_enabled,
)
from vescale_dtensor._torch.untraced import breaks_graph, is_compiling

is_grad_enabled = torch.is_grad_enabled
idle_ones, idle_pairs = IDLE_CALLS.ones, IDLE_CALLS.pairs


def torch_function(
    cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """`DTensor.__torch_function__`: answer a torch function that was called with a DTensor."""
    # Observers and modes have to see each call, and compiled calls do not notify them.
    if observers or is_compiling() or dispatch_modes():
        return _watched_call(func, types, args, kwargs or {})
    if kwargs:
        return _call_with_other(func, types, args, kwargs)
    known: Any
    if len(args) == 2:
        first, second = args
        if type(first) is not DTensor or type(second) is not DTensor:
            kind = type(second)
            # Without a look at all else that a call may be: `x[1:3]`, `softmax(x, -1)`.
            if type(first) is DTensor and len(types) == 1:
                if kind is slice and func is GETITEM:
                    key = index_key(first._spec, second)
                    return call_with_values(func, key, first, (second,), {})
                if kind is int and func not in scalar_agnostic and func not in handlers:
                    key = (func, first._spec, int, second)
                    return call_with_values(func, key, first, (second,), {})
            return _call_with_other(func, types, args, {})
        local, other = first._local_tensor, second._local_tensor
        if local.requires_grad or other.requires_grad:
            # `table_for_operands` written out, where neither has a hidden node.
            usual = (
                is_grad_enabled()
                and not (first._may_have_hidden_node or second._may_have_hidden_node)
                and (local.requires_grad or not any_requires_grad(first))
                and (other.requires_grad or not any_requires_grad(second))
                and forward_grad_enabled()
            )
            table = GRAD_RECORDED if usual else table_for_operands(args)
            known = table.get((func, first._spec, second._spec))
            return _general_call(func, args, {}) if known is None else known(first, second)
        # Spread, since C wants a tuple: one that is there already is not made again.
        if any_requires_grad(*args) and is_grad_enabled():
            return _general_call(func, args, {})  # a custom Function has returned one of them
        try:
            known = idle_pairs[func][first._spec][second._spec]
        except KeyError:
            return _idle_call(func, args)
        return known(first, second)
    if len(args) == 1 and type(first := args[0]) is DTensor:
        local = first._local_tensor
        if local.requires_grad:
            # `table_for_operand` written out, where optimizers ask each parameter for its dtype.
            stepped = first._stray_grad_guard is not None and not is_grad_enabled()
            table = NO_GRAD if stepped else table_for_operand(first)
            known = table.get((func, first._spec))
            return _general_call(func, args, {}) if known is None else known(first)
        if any_requires_grad(*args) and is_grad_enabled():
            return _general_call(func, args, {})
        by_spec = idle_ones.get(func)
        known = None if by_spec is None else by_spec.get(first._spec)
        if known is None:
            return _idle_call(func, args)
        return known(first)
    if len(args) == 3 and len(types) == 1 and type(args[1]) is DTensor is type(args[0]):
        return _call_of_three(func, args, {})
    return _call_with_other(func, types, args, {})


# For `map`, which calls no Python.
_spec_of = attrgetter("_spec")


def _idle_call(func: Callable[..., Any], operands: Any) -> Any:
    """A call of DTensors alone that `IDLE_CALLS` does not hold; autograd records nothing."""
    specs = tuple(map(_spec_of, operands))
    compiled = GRAD_IDLE.get((func, *specs))
    if compiled is None:
        return _general_call(func, operands, {})
    IDLE_CALLS.store(func, specs, compiled)
    return compiled(*operands)


# What `x += y` and its kin call.
_AUGMENTED = frozenset(
    {"add_", "sub_", "mul_", "div_", "floor_divide_", "pow_", "remainder_"}
    | {"__ior__", "__iand__", "__ixor__", "__ilshift__", "__irshift__"}
)


def _call_of_plain(
    run: Callable[..., Any], func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """A call whose first argument is no DTensor.

    `total += x` of a plain `total` makes it a DTensor of the same memory, as `total + x` is one.
    Whoever adds it up over the ranks afterwards would count it once for each, and is told so.
    """
    if args and not is_grad_enabled():
        note_plain_target(args[0])
    result = run(func, args, kwargs)
    # A parameter, or any leaf that is stepped by hand, has to stay the one that it is.
    stays = type(result) is not torch.Tensor or (result.requires_grad and not is_grad_enabled())
    if not stays and func.__name__ in _AUGMENTED and result is args[0]:
        other = next((t for t in args[1:] if type(t) is DTensor), None)
        if other is not None:
            return as_replicated(result, other.device_mesh)
    return result


def _call_with_other(
    func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """A call that is not of one or two DTensors and nothing else."""
    if len(types) > 1 and is_for_others(types, args, kwargs):
        return NotImplemented  # torch asks the other class
    if not args or type(args[0]) is not DTensor:
        return _call_of_plain(_general_call, func, args, kwargs)
    # No table holds such a call of a function with a handler, so the handler comes first.
    handler = handlers.get(func)
    if handler is not None:
        # Python has bound the names of its own functions; C++ takes others besides (`axis=`).
        own_names = not kwargs or type(func) is FunctionType
        if own_names:
            return marked(handler, func, args, kwargs)
        return _general_call(func, args, kwargs)
    kind = type(args[1]) if len(args) > 1 else None
    if kind is DTensor and len(args) == 3:
        return _call_of_three(func, args, kwargs)
    if kind in TENSORS:
        return (
            _call_with_plain(func, args)
            if len(args) == 2 and not kwargs
            else _general_call(func, args, kwargs or {})
        )
    if kind in NUMBERS and func in scalar_agnostic and len(args) == 2 and not kwargs:
        first, number = args
        compiled = table_for_operand(first).get((func, first._spec, kind))
        return _general_call(func, args, {}) if compiled is None else compiled(first, number)
    first, rest = args[0], args[1:]
    if func is GETITEM:
        return call_with_values(func, index_key(first._spec, args[1]), first, rest, kwargs)
    key = exact_key(func, first._spec, rest, kwargs)
    if key is None:  # a DTensor among the values: `layer_norm(x, shape, weight=…)`
        return _general_call(func, args, kwargs)
    return call_with_values(func, key, first, rest, kwargs)


def _call_of_three(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A call of two DTensors and a third, a number, or None: a linear layer, `addcmul_`."""
    first, second, third = args
    last: Any = type(third)
    if third is None:
        table, last = table_of_two(first, second), None
    elif last is DTensor:
        table, last = table_of_three(first, second, third), third._spec
    elif last in NUMBERS and func in scalar_agnostic:
        table = table_for_operands([first, second])
    else:
        return _general_call(func, args, kwargs)
    key: tuple[Any, ...] = (func, first._spec, second._spec, last)
    if not kwargs:  # to spread none costs as much as a look-up
        compiled = table.get(key)
        if compiled is None:
            return _general_call(func, args, kwargs)
        return compiled(first, second, third)
    for name, value in kwargs.items():  # at most one: `value=` or `alpha=`, a factor
        if len(kwargs) > 1 or type(value) not in NUMBERS or func not in scalar_agnostic:
            return _general_call(func, args, kwargs)
        key = (*key, NAMED, name, type(value))
    compiled = table.get(key)
    if compiled is None:
        return _general_call(func, args, kwargs)
    return compiled(first, second, third, **kwargs)


def _call_with_plain(func: Callable[..., Any], args: Any) -> Any:
    """A call of a DTensor and a plain tensor."""
    first, plain = args
    # As in `extend_key`: one that requires grad gets a typed use, and one with another memory
    # order makes another plan.
    strided = plain.layout is torch.strided
    if plain.requires_grad or not (strided and plain.is_contiguous()):
        return _general_call(func, args, {})
    compiled = table_for_operand(first).get((func, first._spec, (plain.shape, plain.dtype)))
    return _general_call(func, args, {}) if compiled is None else compiled(first, plain)


def call_with_values(
    func: Callable[..., Any], key: Any, first: DTensor, values: Any, named: dict[str, Any]
) -> Any:
    """A call of one DTensor and of values, looked up by its exact key.

    Args:
        func: the torch function.
        key: function, spec, all values, and their types (see `exact_key`).
        first: the DTensor.
        values: the other positional arguments.
        named: the named ones.
    """
    table = table_for_operand(first)
    try:
        compiled = table.exact_keys.get(key)
    except TypeError:  # a list among the values: it does not hash
        return _general_call(func, (first, *values), named)
    if compiled is None:
        return _general_call(func, (first, *values), named, key)
    # What is spread over a call is collected first, and costs as much as a look-up.
    if named:
        return compiled(first, *values, **named)
    return compiled(first, values[0]) if len(values) == 1 else compiled(first, *values)


def _general_call(
    func: Callable[..., Any], args: Any, kwargs: dict[str, Any], exact_key: Any = None
) -> Any:
    """A call with any arguments.

    Args:
        func: the torch function.
        args: its arguments by position.
        kwargs: its arguments by name.
        exact_key: the key that missed in `exact_keys`. A hit here is stored under it.
    """
    if kwargs and type(func) is not FunctionType:
        given = kwargs
        args, kwargs = named_as_torch_does(func, args, kwargs)
        # The exact key is of the call as written, and its compiled call would get the arguments as
        # written: not under names that only torch's parser knows.
        exact_key = exact_key if kwargs is given else None
    handler = handlers.get(func)
    if handler is not None:
        if func in constants and len(args) == 1 and not kwargs:
            return compile_constant(func, args[0], handler(args[0]))
        return marked(handler, func, args, kwargs)
    if is_grad_enabled() and not forward_grad_enabled():
        # The forward of a custom Function that enables grad by itself: compiled calls would not
        # mark what they make as the Function's possible outputs.
        return _uncompiled(func, args, kwargs)
    key: list[Any] = [func]
    if func in reads_way:
        key.append(attention_way())
    operands: list[DTensor] = []
    # Where the rule reads no numbers, one entry serves all values of a number.
    exact = func not in scalar_agnostic
    if not extend_key(args, key, operands, exact):
        return dispatch(func, args, kwargs)
    if kwargs:
        key.append(NAMED)
        key.extend(kwargs)
        if not extend_key(kwargs.values(), key, operands, exact):
            return dispatch(func, args, kwargs)
    table = table_for_operands(operands)
    full_key = tuple(key)
    compiled = table.get(full_key)
    if compiled is not None:
        if (
            exact_key is not None
            and len(operands) == 1
            and are_values(args[1:], exact)
            and are_values(kwargs.values(), exact)
        ):
            table.exact_keys.store(exact_key, compiled)
        return compiled(*args, **kwargs)
    if any([operand._spec.has_known_total for operand in operands]):
        return _call_with_known_totals(func, args, kwargs, full_key, table)
    try:
        return compile_call(func, args, kwargs, full_key, table)
    except SeveralSpellingsError:  # raised before anything is computed
        table.store(full_key, partial(_call_on_one_mesh, func))
        return _call_on_one_mesh(func, *args, **kwargs)


def _call_on_one_mesh(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call whose operands are on several spellings of one mesh, with all of them on one."""
    rule = rule_for(func, args, kwargs)
    assert rule is not None
    call = OpCall(func, args, kwargs, Reads.NOTHING)
    # From the start again: on one mesh the call has other specs, hence another key.
    moved, named = on_one_mesh(call, rule)
    return torch_function(DTensor, func, (), tuple(moved), named)


def _call_with_known_totals(
    func: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    key: Any = None,
    table: CallTable | None = None,
) -> Any:
    """A call on partial tensors that some use has reduced already: it gets the totals.

    But for writes and views, which are of the operands themselves.
    """
    rule = rule_for(func, args, kwargs)
    if rule is None or rule.views or rule.writes is not None or kwargs.get("out") is not None:
        return dispatch(func, args, kwargs)
    if table is not None:
        # What is stored is the substitution, not a result: the next call's operands have totals of
        # their own, which may be invalid by then.
        table.store(key, partial(_substitute_totals, func))
    return _substitute_totals(func, *args, **kwargs)


def _substitute_totals(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `func` with the totals of its operands."""
    # From the start again: with the totals, the call has other specs, hence another key.
    named = {name: _known_totals(value) for name, value in kwargs.items()}
    return torch_function(DTensor, func, (), tuple(map(_known_totals, args)), named)


def _known_totals(value: Any) -> Any:
    """An argument, with the totals of partial tensors where they are known."""
    if type(value) is DTensor:
        return cached_total(value) if value._spec.has_known_total else value
    if type(value) in (tuple, list):
        return type(value)([_known_totals(item) for item in value])
    return value


def _watched_call(func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A call while somebody observes, traces or compiles, if it is none of another class."""
    if len(types) > 1 and is_for_others(types, args, kwargs):
        return NotImplemented  # torch asks that class
    return _uncompiled(func, args, kwargs)


def _uncompiled(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A call while somebody observes, traces or compiles: nothing is looked up or stored."""
    if is_compiling():
        return _graph_break(func, args, kwargs)
    # Known totals are used here too, so that observers see the communication that happens without
    # them.
    known = _any_known_total((*args, *kwargs.values()))
    run = _call_with_known_totals if known else dispatch
    if not args or type(args[0]) is not DTensor:
        return _call_of_plain(run, func, args, kwargs)
    return run(func, args, kwargs)


def _any_known_total(values: Iterable[Any]) -> bool:
    """Whether the total of one of the operands is known."""
    return any(
        value._spec.has_known_total
        if type(value) is DTensor
        else type(value) in (tuple, list) and _any_known_total(value)
        for value in values
    )


@breaks_graph(
    "functions of DTensors run eagerly: call what is compiled with fullgraph=True (flex_attention "
    "is: take vescale_dtensor.experimental.flex_attention) in local_map, on x.to_local(), or under "
    "torch.compiler.set_stance('force_eager')"
)
def _graph_break(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Break the graph that torch.compile builds: the call runs eagerly, as without it."""
    return dispatch(func, args, kwargs)
