"""Numbers tensors by the calls that made them: equal on all ranks that made them alike.

A result's lineage follows from the function, the spec of the result and the operands' lineages,
from what is passed besides (`x * 0.5`, `x[3]`, a plain tensor), and from what has written to the
operands. What enters the program (parameters, data) has that of its global shape, and of a digest
of what all ranks should hold alike. Where a tensor comes to be communicated, or a backward starts
from it, ranks compare its lineage (`_layout/execution_events.py`): a call that one rank left out,
or made with another shape, shows there even if nothing else differs; and what a rank computes for
itself shows nowhere. A call that only one rank makes and that flows into what ranks share is a
difference whatever it computes: `x * 1` as well, but no copy (`_TRANSPARENT`).

Lineages are kept in some of the steps of a program: while the log of a mesh `samples`. Those begin
and end at the same point on every rank, so that a tensor from before has one lineage everywhere. In
all other steps a call does no more for this than to look at that attribute.

Lineages are set where a call enters this package, by what the caller wrote. Whichever way the call
takes from there (the fast path, the slow one, a composition) may differ from rank to rank, since
it may depend on the strides of a local tensor; the lineage does not.

Writing in place toggles a lineage, and counts to four in its last two bits: two writes by one
function would cancel each other. A write to `p.data` or `p.grad` is one to `p`: the next step
depends on it, and nothing else may tell.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm.agreement import digest
from vescale_comm.nested import tensors_within

from vescale_dtensor._layout.execution_events import note_numbers, sampling_of, silent
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.observers import compares_plain, observers
from vescale_dtensor._tensor.value_digest import number_token, numbers_within, values_within
from vescale_dtensor._torch.bounded_cache import BoundedCache
from vescale_dtensor._torch.worlds import cached

# These give their operand itself, or a copy, by its memory on this rank. So whoever clones on some
# ranks only does no more than they do: the values are the same, and the gradients.
_TRANSPARENT = frozenset({"clone", "contiguous", "to", "resolve_conj", "resolve_neg"})
_WRITES_BY_OPERATOR = frozenset({"__setitem__", "__set__"})

# Functions that a mode makes take their numbers from elsewhere, where neither a draw nor the calls
# tell: by this argument.
_MODES: dict[Any, str] = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}

_MOST_RESULTS = 16
_COUNT = 3  # the bits of a lineage that count writes

# A number that these are given is that of a device, which each rank has its own of.
_MOVES = frozenset({"cuda", "xpu", "hpu", "mtia", "ipu"})

_writes: BoundedCache[Any, int] = BoundedCache(16384)


class _Pause(threading.local):
    """Whether writes are left out: in a recording, whose replays write without saying so.

    Of each thread its own: ranks of a simulation are threads, and while one waits for a collective
    of a recording another writes outside of it.
    """

    depth = 0


pause = _Pause()


def noted(func: Callable[..., Any], result: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Give the results of a call their lineage, and return them.

    Only while the log of their mesh `samples`, but for copies. Operands that are returned keep
    theirs; results of an optimizer's lists have none.

    Args:
        func: the torch function, as the caller wrote it.
        result: one or several, of any kind.
        args: those by position.
        kwargs: those by name.
    """
    results: Sequence[Any] = (result,) if isinstance(result, Tensor) else result
    if not isinstance(results, list | tuple) or len(results) > _MOST_RESULTS:
        return result
    operands = _operands(args, kwargs)
    given, found = {id(operand) for operand in operands}, None
    for index, one in enumerate(results):
        if type(one) is not DTensor or id(one) in given:
            continue
        if is_copy(func):
            one._lineage = operands[0]._lineage if operands else 0
            continue
        found = _passed(func, args, kwargs) if found is None else found
        words, token = _call(func, one._spec)
        lineages = [operand._lineage for operand in operands]
        place = (index,) if results is result else ()
        one._lineage = hash((*lineages, token, *place, *found[1]))
        sampling_of(one._spec.layout.mesh).say(f"{_name(func)}{found[0]} → {words}")
    return result


def is_copy(func: Callable[..., Any]) -> bool:
    """Whether the result of a call is its operand, or has the lineage of that at any time.

    Which of the two it is may depend on the strides of this rank.
    """
    return _name(func) in _TRANSPARENT


def _passed(
    func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> tuple[str, tuple[int, ...]]:
    """What a call is given besides DTensors, in words and as numbers."""
    if not kwargs and all([type(one) is DTensor for one in args]):
        return "", ()  # most often
    if silent.get() or _name(func) in _MOVES:
        return "", ()
    numbers = numbers_within(args, kwargs)
    tokens = (number_token(numbers),) if numbers else ()
    if func in _MODES:
        tokens = (*tokens, int(bool(kwargs.get(_MODES[func]))))
    words = f" of {', '.join(map(_told, numbers))}" if numbers else ""
    if observers and compares_plain() is False:  # ranks may run different ops on purpose
        return words, tokens
    return words, (*tokens, *values_within(_name(func), args, kwargs))


@cached(32768)
def _call(func: Callable[..., Any], spec: Spec) -> tuple[str, int]:
    """What a call makes in words, and what it is as a number.

    Without the dtype: under autocast a known call gives another one than when it was compiled.
    """
    # Hashes of numbers are equal in every process, so that only words are digested.
    return str(spec), hash((digest(_name(func)), *spec.shape, digest(str(spec.layout))))


def write_token(func: Callable[..., Any]) -> int:
    """What a write by this function toggles; 0 where it is none."""
    known = _writes.get(func)
    if known is None:
        name = _name(func)
        operator = name.startswith("__i") or name in _WRITES_BY_OPERATOR
        in_place = name.endswith("_") and not name.endswith("__")
        known = digest(name) if operator or in_place else 0
        _writes.store(func, known)
    return known


def _told(number: Any) -> str:
    if isinstance(number, list):
        return f"[{', '.join(map(_told, number))}]"
    return number if isinstance(number, str) else f"{number:.6g}"


def note_write(func: Callable[..., Any], target: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Note that a call has written to a tensor; only while the log of its mesh `samples`."""
    if type(target) is DTensor and not pause.depth:
        token = _written(func, target, args, kwargs)
        # Of a list only the call is compared: with stages each rank has a list of its own, and the
        # first gradient is that of another parameter.
        for tensor in (target, *([] if _is_list(args) else _owners(target))):
            _toggle(tensor, token)


def _written(
    func: Callable[..., Any], target: DTensor, values: Any, named: Mapping[str, Any]
) -> int:
    """What a write toggles.

    Numbers that a parameter, or its gradient, is changed by may be others at each step, and it
    stays. So they are noted beside its lineage, for the digest alone: nobody writes to a parameter
    on one rank only. What it is changed by, if it is a tensor, is noted there by its lineage; but
    for views of gradients, of which a rank may have forgotten what was written.
    """
    token = write_token(func)
    if silent.get():
        return token
    numbers = numbers_within(values, named)
    # Not by what it is a part of, which may be gone on some ranks.
    if target._is_trained_part or is_trained(target):
        operands = [
            each
            for each in _operands(values, named)
            if each is not target and each._part_of is None
        ]
        told = {f"number {place}": value for place, value in enumerate(_flat(numbers))}
        if len(operands) <= _MOST_RESULTS:
            told |= {f"lineage {place}": each._lineage for place, each in enumerate(operands)}
        # A write without either (`p.zero_()`) is noted by its being one, but not one to a gradient:
        # that matters where a step is made by it, which has operands; but for lists.
        if told or target._grad_of is None or _is_list(values):
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
    if isinstance(target, DTensor) and _is_noted(target):
        _toggle(target, digest(what))


def note_assigned(tensor: DTensor, name: str, value: DTensor | None = None) -> None:
    """Note that `.data` or `.grad` of a tensor was assigned, or that its gradient was dropped.

    Args:
        tensor: whose.
        name: `"data"` or `"grad"`.
        value: what a parameter, or its gradient, is from now on; noted as other writes to it are.
    """
    if not _is_noted(tensor):
        return
    _toggle(tensor, digest(name))
    if value is not None and is_trained(tensor):
        # Not what a gradient was computed from: a rank may have forgotten writes to one.
        told = {"lineage": value._lineage} if name == "data" else {"dims": value.ndim}
        note_numbers(tensor._spec.layout.mesh, f"assigning .{name}", told)


def _is_noted(tensor: DTensor) -> bool:
    return _is_sampled(tensor) and not pause.depth


def _is_sampled(tensor: DTensor) -> bool:
    return sampling_of(tensor._spec.layout.mesh).samples


def _toggle(tensor: DTensor, token: int) -> None:
    before = tensor._lineage
    tensor._lineage = (before ^ token) & ~_COUNT | (before + 1) & _COUNT


def marked(
    run: Callable[..., Any], func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """`run(*args, **kwargs)`, which answers a call of `func`: its result, with its lineage."""
    target = _first(args) if write_token(func) else None
    if target is not None and _is_noted(target):
        written = (target, *_owners(target))
        before = [tensor._lineage for tensor in written]
        result = run(*args, **kwargs)
        # Whatever was written on the way: that may differ from rank to rank.
        for tensor, lineage in zip(written, before, strict=True):
            tensor._lineage = lineage
        note_write(func, target, args, kwargs)
        return result
    result = run(*args, **kwargs)
    several = result if isinstance(result, list | tuple) else (result,)  # named ones, too
    made = next((one for one in several if type(one) is DTensor), None)
    if made is not None and target is None and (is_copy(func) or _is_sampled(made)):
        noted(func, result, args, kwargs)
    return result


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


def _is_list(args: Any) -> bool:
    return bool(args) and type(args[0]) in (list, tuple)


def _operands(*values: Any) -> list[DTensor]:
    found: list[Any] = tensors_within(values)
    return [one for one in found if type(one) is DTensor]


def _name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", type(func).__name__))
