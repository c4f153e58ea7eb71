"""The template of compiled calls: a form describes one, and its source is written from that.

A form says what is where among the arguments, and what a call has to do besides calling torch on
the local tensors and wrapping the result. Every step stands once in the template, and is left out
of a source that has no need of it: what runs at each call asks nothing that was known before. A
source is compiled once, and bound to the function and the specs of each call of its form.

`compile` describes calls; `compile_general` serves what no form describes.
"""

# ruff: noqa: F401 - the template uses what is imported here, and is looked up in these globals
from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from vescale_dtensor._autograd.local_use import recorded_local
from vescale_dtensor._autograd.redistribution_cache import redistributed_cached
from vescale_dtensor._dispatch.dispatch import dispatch
from vescale_dtensor._dispatch.execute import after_mutation
from vescale_dtensor._dispatch.overlapping_writes import is_overlap
from vescale_dtensor._fast_path.cache import CompiledCall
from vescale_dtensor._fast_path.compile_general import wrap_other_dtype
from vescale_dtensor._layout.execution_events import sampling_of
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._planning.plan import OperandUse, function_name
from vescale_dtensor._tensor.copied_views import (
    check_writable,
    live_copies,
    mark_copy,
    same_memory,
    unwritable,
)
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.lineage import note_write, noted
from vescale_dtensor._torch.compat import close_memory, new_wrapper

# A line with steps behind `#:` is in the sources of the forms that have all of them.
_TEMPLATE = """
def bind(func, original, spec, hidden, uses):
    log = sampling_of(spec.layout.mesh)
    dtype = spec.tensor_meta.dtype
    {masks} = [use.varying for use in uses]                             #: typed
    {layouts} = [use.layout for use in uses]                            #: moves

    def run({parameters}):
        {by_name}                                                       #: names
        # A view of a copy is a copy too, and one of a gradient changes its layout with that.
        if {first}._view_copy_of is not None or {first}._grad_of is not None:  #: views
            return dispatch(original, {arguments}, {named})             #: views
        # Copied views come and go between calls, so this is asked every time.
        if live_copies or unwritable or {first}._view_copy_of is not None:  #: writes
            if {first}._rare.way_back is not None:                           #: writes
                return dispatch(original, {arguments}, {named})         #: writes
            check_writable({first}, function_name(original))            #: writes
        # Reducing a gradient for one use changes the layout of other operands that are the same
        # gradient: the slow path looks again after all were redistributed.
        if {gradients}:                                                 #: moves
            return dispatch(original, {arguments}, {named})             #: moves
        # All are redistributed before any is used, in the order of the slow path, which another
        # rank may take. Backward runs nodes in the reverse order of their making, and those that
        # communicate have to do so in one order on all ranks.
        {moved}                                                         #: moves
        local = {local}                                                 #: strided
        try:                                                            #: writes
            func(*{locals}{spread})                                     #: writes
        except RuntimeError as error:                                   #: writes
            if not is_overlap(error):                                   #: writes
                raise                                                   #: writes
            # It knows where one device has gaps.
            return dispatch(original, {arguments}, {named})             #: writes
        after_mutation({first})                                         #: writes
        if log.samples:                                                 #: writes
            note_write(original, {first}, {arguments}, {named})         #: writes
        return {first}                                                  #: writes
        # Spread, since C wants a tuple: one that is there already is not made again.
        result = func(*{locals}{spread})                                #: makes
        # x.contiguous(), x.to(...): one local tensor keeps one wrapper.
        if result is {first}._local_tensor:                             #: returns
            return {first}                                              #: returns
        # Autocast, or another default dtype.
        if result.dtype is not dtype:                                   #: makes checked
            wrapper = wrap_other_dtype(result, spec)                    #: makes checked
            wrapper._lineage = {lineage}                                #: makes checked
            if log.samples:                                             #: makes checked
                noted(original, wrapper, {arguments}, {named})          #: makes checked
            return wrapper                                              #: makes checked
        wrapper = new_wrapper(*(DTensor, result, spec, {requires_grad}))  #: makes
        close_memory(wrapper)                                           #: makes
        wrapper._may_have_hidden_node = hidden                          #: makes
        wrapper._lineage = {lineage}                                    #: makes
        # The local op copies where its strides allow no view, though one device views. The branch
        # depends on the rank; nothing but the mark follows from it.
        if not (local.is_contiguous() or same_memory(result, local)):   #: strided
            mark_copy(wrapper, {first})                                 #: strided
        if log.samples:                                                 #: makes
            noted(original, wrapper, {arguments}, {named})              #: makes
        return wrapper                                                  #: makes
    return run
"""
_LINES = [
    line.partition("#:")[::2]
    for line in _TEMPLATE.splitlines()
    if not line.lstrip().startswith("#")
]


class Form(NamedTuple):
    """What the compiled calls of one source have in common.

    Attributes:
        kinds: a letter for each argument by position: `t` for a DTensor, `l` for a list and `s` for
            a tuple of them, `n` for None, and `v` for any other value.
        names: of the DTensors among the arguments by name.
        named: whether there are arguments by name.
        steps: which steps there are, of those that do not follow from the arguments: it `writes` to
            its first operand, or `makes` a result; autograd records it, so that each use is
            `typed`; the result may require `grad`; it `moves` operands to other layouts; it gives
            `views` of the first operand, `strided` if the strides of this rank may make one a copy;
            the result's dtype is `checked`, for it may be another one than the spec's; it `copies`
            the first operand, of which it is no other tensor to those who compare lineages.
    """

    kinds: str
    names: tuple[str, ...]
    named: bool
    steps: frozenset[str]


class BoundValues(NamedTuple):
    """What the source of a form is bound to, for the calls of one key.

    Attributes:
        func: called on the local tensors.
        original: the torch function of the call.
        spec: of the result.
        hidden: whether a custom Function may give the result a node.
        uses: of each DTensor.
    """

    func: Callable[..., Any]
    original: Callable[..., Any]
    spec: Spec
    hidden: bool
    uses: Sequence[OperandUse]


def compiled_call(form: Form, bound: BoundValues) -> CompiledCall:
    """The compiled call of this form for one function and its specs."""
    call: CompiledCall = _factory(form)(*bound)
    return call


@lru_cache(maxsize=4096)
def _factory(form: Form) -> Callable[..., CompiledCall]:
    """The function that binds compiled calls of a form."""
    given, source = form.steps | _follows(form), _words(form)
    lines = [line.rstrip() for line, steps in _LINES if given.issuperset(steps.split())]
    text = "\n".join(lines).format_map(source)
    # In this file's folder, for whoever tells the user's frames from others by that.
    arguments = ", ".join([*form.kinds, *form.names, *["**"][: form.named]])
    name = f"{__file__}: ({arguments}) {' '.join(sorted(given))}"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    made: dict[str, Any] = {}
    exec(compile(text, name, "exec"), globals(), made)
    factory: Callable[..., CompiledCall] = made["bind"]
    return factory


def _follows(form: Form) -> set[str]:
    """The steps that follow from the arguments."""
    # What is made of several tensors and nothing else is none of them.
    several = len(form.kinds) > 1 and set(form.kinds) <= {"t", "n"}
    found = {
        "names": form.names,
        "returns": not several and not form.steps & {"writes", "moves"},
    }
    return {step for step, holds in found.items() if holds}


def _words(form: Form) -> dict[str, str]:
    """What the places of the template hold."""
    given = [f"{kind}{place}" for place, kind in enumerate(form.kinds)]
    by_name = {f"t{place}": name for place, name in enumerate(form.names, len(given))}
    operands = [*(each for each in given if each[0] in "tls"), *by_name]
    local = {each: _local(each, n, form.steps) for n, each in enumerate(operands)}
    words = {"local": local[operands[0]]}
    if "strided" in form.steps:
        local[operands[0]] = "local"
    replaced = "".join(f", {name!r}: {local[each]}" for each, name in by_name.items())
    first = operands[0] if operands[0][0] == "t" else f"{operands[0]}[0]"
    return words | {
        "parameters": ", ".join([*given, "/"][: len(given) and None] + ["**named"][: form.named]),
        "first": first,
        "arguments": _tuple(given),
        "named": "named" if form.named else "{}",
        "by_name": "; ".join(f"{each} = named[{name!r}]" for each, name in by_name.items()),
        "locals": _tuple([local.get(each, each) for each in given]),
        "spread": f", **{{**named{replaced}}}" if replaced else ", **named" if form.named else "",
        "masks": _tuple(
            [f"m{n}" if each[0] == "t" else f"*m{n}" for n, each in enumerate(operands)]
        ),
        "layouts": _tuple([f"u{n}" for n, _ in enumerate(operands)]),
        "gradients": " or ".join(f"{each}._grad_of is not None" for each in operands),
        "moved": "; ".join(
            f"moved{n} = redistributed_cached({each}, u{n})" for n, each in enumerate(operands)
        ),
        "lineage": f"{first}._lineage" if "copies" in form.steps else "0",
        "requires_grad": "result.requires_grad" if "grad" in form.steps else "False",
    }


def _local(operand: str, place: int, steps: frozenset[str]) -> str:
    """The local tensor, or tensors, of an operand."""
    if operand[0] in "ls":
        typed = f"recorded_local(each, mask) for each, mask in zip({operand}, m{place})"
        found = typed if "typed" in steps else f"each._local_tensor for each in {operand}"
        return f"[{found}]" if operand[0] == "l" else f"tuple([{found}])"
    held = f"moved{place}" if "moves" in steps else operand
    return f"recorded_local({held}, m{place})" if "typed" in steps else f"{held}._local_tensor"


def _tuple(items: list[str]) -> str:
    return f"({''.join(f'{item}, ' for item in items)})"
