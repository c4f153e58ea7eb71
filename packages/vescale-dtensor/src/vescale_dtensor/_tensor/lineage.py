"""Which calls made a tensor, as one number: it is equal on all ranks that made it alike.

A result's lineage follows from the function, the spec of the result and the operands' lineages.
What enters the program (parameters, data) has that of its global shape, and of a digest of what
all ranks should hold alike. Where a tensor comes to be communicated, or a
backward starts from it, ranks compare its lineage (`_layout/executed.py`): a call that one rank
left out, or made with another shape, shows there even if nothing else differs; and what a rank
computes for itself shows nowhere. A call that only one rank makes and that flows into what ranks
share is a difference whatever it computes: `x * 1` as well, but no copy (`_TRANSPARENT`).

Lineages are set where a call enters this package, by what the caller wrote. Whichever way the call
takes from there (the fast path, the slow one, a composition) may differ from rank to rank, since
it may depend on the strides of a local tensor; the lineage does not.

Of the numbers that are passed (`x * 0.5`, `x[3]`, a plain tensor without dims) a digest is added
where the log `samples`: they may change at every step, and then every lineage would be new.

Writing in place toggles a lineage, and counts to four in its last two bits: two writes by one
function would cancel each other. So lineages of parameters are the same again every few steps, and
what a steady program compares is never new. A write to `p.data` or `p.grad` is one to `p`: the
next step depends on it, and nothing else may tell.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import ExecutionLog
from vescale_comm.agreement import digest

from vescale_dtensor._layout.executed import (
    Sampling,
    calls,
    keeps_lineages,
    note_numbers,
    nothing,
    sampling_of,
    silent,
)
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.value_digest import number_token, numbers_within
from vescale_dtensor._torch.bounded_cache import BoundedCache
from vescale_dtensor._torch.worlds import cached, on_world_change

# These give their operand itself, or a copy, by its memory on this rank. So whoever clones on some
# ranks only does no more than they do: the values are the same, and the gradients.
_TRANSPARENT = frozenset({"clone", "contiguous", "to", "resolve_conj", "resolve_neg"})
_WRITES_BY_OPERATOR = frozenset({"__setitem__", "__set__"})

# Functions that a mode makes take their numbers from elsewhere, where neither a draw nor the calls
# tell. They have handlers, so that every call comes by `marked`, with these arguments by name.
_MODES: dict[Any, str] = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}

_MOST_RESULTS = 16
_COUNT = 3  # the bits of a lineage that count writes

# A number that these are given is that of a device, which each rank has its own of.
_MOVES = frozenset({"cuda", "xpu", "hpu", "mtia", "ipu"})

# Types of arguments that hold no tensor.
_VALUES = frozenset({bool, int, float, str, type(None), torch.dtype})

_names: BoundedCache[Any, int] = BoundedCache(16384)
_writes: BoundedCache[Any, int] = BoundedCache(16384)
_calls: BoundedCache[tuple[Any, Spec], Mark] = BoundedCache(32768)
on_world_change(_calls.clear)  # it holds specs


class Mark(NamedTuple):
    """What a call adds to the lineage of its result.

    Attributes:
        token: a number for the function and the spec of the result; 0 where the operand may be the
            result, and where nothing is compared.
        log: tells by its `samples` whether the numbers are added that the call is given.
        call: function and spec of the result.
    """

    token: int
    log: ExecutionLog | Sampling
    call: tuple[Any, Any]


# What calls add where nothing is compared.
_NOTHING = Mark(0, nothing, (None, None))


class _Pause(threading.local):
    """Whether writes are left out: in a recording, whose replays write without saying so.

    Of each thread its own: ranks of a simulation are threads, and while one waits for a collective
    of a recording another writes outside of it.
    """

    depth = 0


pause = _Pause()


def call_mark(func: Callable[..., Any], spec: Spec) -> Mark:
    """What a call adds to the lineage of its result, by its function and the result's spec."""
    if not keeps_lineages(spec.layout.mesh):
        return _NOTHING  # not stored: the first call with each shape would pay for it
    known = _calls.get((func, spec))
    if known is None:
        name = _name(func)
        token = 0 if name in _TRANSPARENT else _token_of_result(func, spec)
        unseen = not token or name in _MOVES
        known = Mark(token, nothing if unseen else sampling_of(spec.layout.mesh), (func, spec))
        _calls.store((func, spec), known)
    return known


def with_numbers(lineage: int, mark: Mark, values: Iterable[Any], named: Mapping[str, Any]) -> int:
    """A lineage with the numbers that the call was given; only where its log `samples`.

    Args:
        lineage: of the result, by the operands and the call.
        mark: of the call.
        values: its arguments by position; DTensors among them are passed over.
        named: those by name.
    """
    numbers = numbers_within(values, named)
    if not numbers or silent.get():
        return lineage
    func, spec = mark.call
    calls.append((f"{_name(func)} of {', '.join(map(_told, numbers))}", spec))
    return hash((lineage, number_token(numbers)))


def _token_of_result(func: Callable[..., Any], spec: Spec) -> int:
    # Without the dtype: under autocast a known call gives another one than when it was compiled.
    # Hashes of numbers are equal in every process, so that only the layout's words are digested.
    return hash((_name_token(func), *spec.shape, _layout_token(spec.layout)))


@cached(8192)
def _layout_token(layout: Layout) -> int:
    return digest(str(layout))


def write_token(func: Callable[..., Any]) -> int:
    """What a write by this function toggles; 0 where it is none."""
    known = _writes.get(func)
    if known is None:
        name = _name(func)
        operator = name.startswith("__i") or name in _WRITES_BY_OPERATOR
        in_place = name.endswith("_") and not name.endswith("__")
        known = _name_token(func) if operator or in_place else 0
        _writes.store(func, known)
    return known


def _told(number: Any) -> str:
    if isinstance(number, list):
        return f"[{', '.join(map(_told, number))}]"
    return number if isinstance(number, str) else f"{number:.6g}"


def token_with_numbers(
    target: DTensor, token: int, func: Callable[..., Any], values: Sequence[Any], named: Any
) -> int:
    """What a write toggles by a call in whose log numbers are looked at.

    Those that a parameter, or its gradient, is changed by may be others at each step, and it stays
    when nobody looks any more. So they are noted beside its lineage, for the digest alone: nobody
    writes to a parameter on one rank only. What it is changed by, if it is a tensor, is noted there
    by its lineage; but for views of gradients, of which a rank may have forgotten what was written.
    """
    if silent.get() or pause.depth:
        return token
    numbers = numbers_within(values, named)
    # Not by what it is a part of, which may be gone on some ranks.
    if target._is_trained_part or is_trained(target):
        operands = [
            each
            for each in _operands((values, tuple(named.values())))
            if each is not target and each._part_of is None
        ]
        told = {f"number {place}": value for place, value in enumerate(_flat(numbers))}
        if len(operands) <= _MOST_RESULTS:
            told |= {f"lineage {place}": each._lineage for place, each in enumerate(operands)}
        # A write without either (`p.zero_()`) is noted by its being one, but not one to a gradient:
        # that matters where a step is made by it, which has operands.
        if told or target._grad_of is None:
            note_numbers(target._spec.layout.mesh, _name(func), told)
        return token
    return hash((token, number_token(numbers))) if numbers else token


def note_part(part: DTensor, whole: DTensor) -> None:
    """Note that a write to `part`, such as its `.data`, is one to the whole."""
    part._part_of = weakref.ref(whole)
    if whole._is_trained_part or is_trained(whole):
        part._is_trained_part = True


def is_trained(tensor: DTensor) -> bool:
    """Whether a tensor is a leaf that wants gradients."""
    local = tensor._local_tensor
    if not local.requires_grad:
        return False
    try:
        return local.is_leaf
    except RuntimeError:  # a view that was made without grad, whose memory was written to since
        return True


def _flat(numbers: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for each in numbers:
        found += _flat(each) if isinstance(each, list) else [each]
    return found


def toggle(target: Any, token: int) -> None:
    """Note a write to a tensor."""
    if type(target) is DTensor and not pause.depth:
        # `_set_written` written out: optimizers come here for each write.
        before = target._lineage
        target._lineage = (before ^ token) & ~_COUNT | (before + 1) & _COUNT
        if target._part_of is not None:
            for owner in _owners(target):
                _set_written(owner, owner._lineage, token)


def note_origin(tensor: DTensor, digests: tuple[int, ...] = ()) -> None:
    """Begin the lineage of a tensor that no call on DTensors has made, but every rank in one call.

    Args:
        tensor: of one global shape on every rank, or else this tells.
        digests: of its values, where somebody has looked at them on every rank.
    """
    tensor._lineage = hash((*tensor._spec.shape, *digests))


def looked_at(mesh: DeviceMesh, numbers: Sequence[Any]) -> tuple[int, ...]:
    """Return a digest of numbers that a tensor of a mesh is made by; empty where nobody looks."""
    looking = sampling_of(mesh).samples and not silent.get()
    found = numbers_within(numbers, {}) if looking else []
    return (number_token(found),) if found else ()


def note_written(target: Tensor, what: str) -> None:
    """Note that every rank has written to the memory of a tensor, past all calls on DTensors.

    For whoever steps the memory of many parameters as one: ranks of which some do not are told, as
    they are of a call.

    Args:
        target: one of the tensors that were written to; of plain ones nothing is noted.
        what: has written: equal on every rank.
    """
    if pause.depth or not isinstance(target, DTensor):
        return
    token = _names.get(what)
    if token is None:
        token = digest(what)
        _names.store(what, token)
    _set_written(target, target._lineage, token)


def note_assigned(tensor: DTensor, name: str, value: DTensor | None = None) -> None:
    """Note that `.data` or `.grad` of a tensor was assigned, or that its gradient was dropped.

    Args:
        tensor: whose.
        name: `"data"` or `"grad"`.
        value: what a parameter, or its gradient, is from now on; noted as other writes to it are.
    """
    if pause.depth:
        return
    _set_written(tensor, tensor._lineage, _ASSIGNED[name])
    mesh = tensor._spec.layout.mesh
    if value is not None and is_trained(tensor) and sampling_of(mesh).samples:
        # Not what a gradient was computed from: a rank may have forgotten writes to one.
        told = {"lineage": value._lineage} if name == "data" else {"dims": value.ndim}
        note_numbers(mesh, f"assigning .{name}", told)


def note_dropped(tensor: DTensor) -> None:
    """Note that `.grad` of a tensor was set to None, where writes are noted."""
    before = tensor._lineage
    # `_set_written` written out: `zero_grad` comes here for each parameter.
    tensor._lineage = (before ^ _ASSIGNED["grad"]) & ~_COUNT | (before + 1) & _COUNT


def _set_written(tensor: DTensor, before: int, token: int) -> None:
    tensor._lineage = (before ^ token) & ~_COUNT | (before + 1) & _COUNT


def marked(
    run: Callable[..., Any], func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """`run(*args, **kwargs)`, which answers a call of `func`: its result, with its lineage."""
    token = _writes.get(func)
    if token is None:
        token = write_token(func)
    if token:
        target = _first(args)
        written = () if target is None else (target, *_owners(target))
        before = [tensor._lineage for tensor in written]
        result = run(*args, **kwargs)
        # Whatever was written on the way: that may differ from rank to rank.
        if not pause.depth:
            if target is not None and sampling_of(target._spec.layout.mesh).samples:
                token = token_with_numbers(target, token, func, args, kwargs)
            for tensor, lineage in zip(written, before, strict=True):
                _set_written(tensor, lineage, token)
        return result
    result = run(*args, **kwargs)
    if type(result) is DTensor:
        if not keeps_lineages(result._spec.layout.mesh):
            return result
        first: Any = args[0] if args else None
        # Most calls are of one DTensor and of values: no list of operands is made for them.
        if (
            type(first) is DTensor
            and (len(args) == 1 or _are_values(args[1:]))
            and (not kwargs or _are_values(kwargs.values()))
        ):
            if result is not first:
                call = func, result._spec
                token, log, _ = mark = _calls.get(call) or call_mark(*call)
                # As `_mark` does, with one operand.
                if token:
                    result._lineage = hash((first._lineage, token))
                    calls.append(call)
                    if log.samples:
                        result._lineage = with_numbers(result._lineage, mark, args, kwargs)
                else:
                    result._lineage = first._lineage
        else:
            mark_results(func, (result,), args, kwargs)
        if func in _MODES and result is not first:
            result._lineage = hash((result._lineage, bool(kwargs.get(_MODES[func]))))
    elif isinstance(result, list | tuple):  # named ones, too
        mark_results(func, result, args, kwargs)
    return result


def _are_values(arguments: Iterable[Any]) -> bool:
    # A loop, and not `map`: that calls `type`, at five times the cost.
    for each in arguments:  # noqa: SIM110 - a generator costs more than what it asks
        if type(each) not in _VALUES:
            return False
    return True


def mark_results(func: Callable[..., Any], results: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Give results the lineage that this call gives them; not those that are its operands.

    Those of an optimizer's lists have none: hundreds at once would cost as much as the call.
    """
    if len(results) > _MOST_RESULTS or not _any_kept(results):
        return
    operands = _operands((args, tuple(kwargs.values())) if kwargs else args)
    given = {id(operand) for operand in operands}
    for index, result in enumerate(results):
        if type(result) is DTensor and id(result) not in given:
            mark = _mark(func, result, operands, *((index,) if index else ()))
            if mark.log.samples:
                result._lineage = with_numbers(result._lineage, mark, args, kwargs)


def _any_kept(results: Iterable[Any]) -> bool:
    """Whether lineages of the results may be compared: asked of the first DTensor's world."""
    for result in results:
        if type(result) is DTensor:
            return keeps_lineages(result._spec.layout.mesh)
    return False


def _owners(target: DTensor) -> list[DTensor]:
    """What a write to `target` is one to as well: the leaf, of `p.grad.data`."""
    found: list[DTensor] = []
    while target._part_of is not None and (owner := target._part_of()) is not None:
        found.append(owner)
        target = owner
    return found


def _first(args: Any) -> DTensor | None:
    """What is written to: the first operand, or the first one of a list."""
    while type(args) in (list, tuple) and args:
        args = args[0]
    return args if type(args) is DTensor else None


def _mark(
    func: Callable[..., Any], result: DTensor, operands: Sequence[DTensor], *index: int
) -> Mark:
    call = func, result._spec
    mark = _calls.get(call) or call_mark(*call)
    if mark.token:
        lineages = [operand._lineage for operand in operands]
        result._lineage = hash((*lineages, mark.token, *index))
        calls.append(call)
    else:
        result._lineage = operands[0]._lineage if operands else 0
    return mark


def _operands(values: Any) -> list[DTensor]:
    found: list[DTensor] = []
    for value in values:
        if type(value) is DTensor:
            found.append(value)
        elif type(value) in (list, tuple):
            found += _operands(value)
    return found


def _name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", type(func).__name__))


def _name_token(func: Callable[..., Any]) -> int:
    known = _names.get(func)
    if known is None:
        known = digest(_name(func))
        _names.store(func, known)
    return known


# Computed once: every `zero_grad()` assigns as many gradients as there are parameters.
_ASSIGNED = {name: digest(name) for name in ("data", "grad")}
