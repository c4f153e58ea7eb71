"""Rebuilds what a replay returns from the program's results and the call.

An output that was an argument or existed before is that very object again. A new DTensor gets a new
wrapper with the aliases that the program made, so that later uses share the reduction of its
gradient, as in eager mode.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, fx

from vescale_dtensor._autograd.redistribution_cache import CachedRedistribution
from vescale_dtensor._autograd.uses import UseAliases
from vescale_dtensor._capture.guard.call_key import LEAVES, cached_uses
from vescale_dtensor._capture.guard.kinds import kind_of_class
from vescale_dtensor._capture.guard.places import MISSING
from vescale_dtensor._capture.guard.records import Form, flatten, is_record, unflatten
from vescale_dtensor._capture.record.graph import TracedGraph
from vescale_dtensor._capture.record.unsupported import OF_FUNCTION, refusal
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._tensor.copied_views import mark_copy
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._torch.compat import hidden_node

Make = Callable[[list[Any], Sequence[Any]], Any]
"""An output, of the flat arguments of the call and the results of the program."""


@dataclass(frozen=True)
class Outputs:
    """How to put the outputs together.

    Attributes:
        makes: one for each flat output.
        form: how they are put together; None for a single tensor.
        repeats: pairs of an output that is returned before, and the index of that one.
    """

    makes: tuple[Make, ...]
    form: Form | None
    repeats: tuple[tuple[int, int], ...] = ()

    def __call__(self, flat: list[Any], results: Sequence[Any]) -> Any:
        """The outputs of one replay."""
        if self.form is None:
            return self.makes[0](flat, results)
        made = [make(flat, results) for make in self.makes]
        for index, first in self.repeats:
            made[index] = made[first]
        return unflatten(made, self.form)

    def first(self) -> tuple[int, Spec | None] | None:
        """The place of the first output among the results, and its spec if it is a DTensor.

        None if it is no tensor that the program makes.
        """
        make = self.makes[0] if self.makes else None
        if isinstance(make, _Wrapped):
            return make.place, make.spec
        return (make.place, None) if isinstance(make, _Plain) else None

    def same(self) -> list[Any]:
        """What every call returns as it is: constants, and tensors from outside."""
        return [make.value for make in self.makes if isinstance(make, _Same)]


def tensors_in(outputs: Any) -> list[Tensor]:
    """The tensors among the outputs."""
    return [value for value in flatten(outputs)[0] if isinstance(value, Tensor)]


def drop_lineage(outputs: Any, given: Sequence[Any]) -> None:
    """Leave outputs as a replay does: ranks may differ in when they record again."""
    plain = LEAVES.issuperset(map(type, given))
    if plain and type(outputs) is DTensor:  # most often, and every call that just runs comes here
        for one in given:
            if one is outputs:
                return
        outputs._lineage = 0
        return
    found = [outputs] if isinstance(outputs, Tensor) else tensors_in(outputs)
    made = [one for one in found if isinstance(one, DTensor) and one._lineage]
    # An argument that is returned keeps its own: it is the caller's.
    kept = set(map(id, given if plain else tensors_in(list(given))))
    for value in made:
        if id(value) not in kept:
            value._lineage = 0


def plan_outputs(
    outputs: Any, flat: list[Any], trace: TracedGraph
) -> tuple[Outputs, list[fx.Node]]:
    """How to make the outputs of a replay, and the nodes whose values it needs.

    Raises:
        CaptureError: an output that a replay could not make anew.
    """
    results: list[fx.Node] = []
    _check_factories(outputs, trace)
    values, form = flatten(outputs)
    first: dict[int, int] = {}
    repeats = []
    makes: list[Make] = []
    for index, value in enumerate(values):
        before = first.setdefault(id(value), index) if isinstance(value, Tensor) else index
        if before != index:
            repeats.append((index, before))
        makes.append(_make(value, flat, trace, results) if before == index else _Same(MISSING))
    return Outputs(
        tuple(makes), None if isinstance(outputs, Tensor) else form, tuple(repeats)
    ), results


def _check_factories(tree: Any, trace: TracedGraph) -> None:
    """Refuse default dicts whose factory holds what belongs to one call.

    Raises:
        CaptureError: one does.
    """
    if isinstance(tree, defaultdict) and tree.default_factory is not None:
        _of_python(tree.default_factory, trace)
    if isinstance(tree, list | dict | tuple):
        for item in tree.values() if isinstance(tree, dict) else tree:
            _check_factories(item, trace)


def _make(value: Any, flat: list[Any], trace: TracedGraph, results: list[fx.Node]) -> Make:
    """How one output is made at a replay; appends to `results` the nodes that it needs."""
    for index, argument in enumerate(flat):
        # Before all else: an argument may also be known from outside, and the next call brings
        # another one.
        if argument is value:
            return _Argument(index)
    if not isinstance(value, Tensor):
        return _of_python(value, trace)
    # The very object that the recording met: the guards see to it that code reaches the same one.
    if value in trace.outside:
        return _Same(value)
    if not isinstance(value, DTensor):
        return _Plain(_result(value, trace, results))
    if hidden_node(value) is not None:  # what a Function returned, and no op has used
        raise refusal(OF_FUNCTION)
    # Its wrapper belongs to the leaf, which may replace it at the next accumulation.
    if value._grad_of is not None:
        raise refusal(
            "the gradient of a parameter is returned, of which each call has another one. Read "
            "p.grad after the call"
        )
    return _wrapped(value, trace, results)


def _of_python(value: Any, trace: TracedGraph) -> Make:
    """How an output that is no tensor is made."""
    if trace.met(value):
        return _Same(value)
    if is_record(value):
        return _Same(MISSING)  # made anew of the values that follow
    # Slices may hold tensors; enums of the user's have a kind for what has attributes.
    constant = kind_of_class(type(value)) == "constant" and not isinstance(value, slice)
    if constant or isinstance(value, Enum):
        return _Same(value)
    raise refusal(
        f"a {type(value).__name__} that the function makes is returned, of which each call would "
        "return the first one. Return what is in it, in a tuple, list or dict"
    )


def _wrapped(value: DTensor, trace: TracedGraph, results: list[fx.Node]) -> _Wrapped:
    """How a new DTensor is made: its local tensor, its caches, what it is a copied view of.

    Appends to `results` the nodes that it needs.
    """
    aliases, cached = cached_uses(value)
    # With the caches that the uses inside left: a later use outside shares their node, and with it
    # one collective in backward.
    masks = aliases.by_mask.items() if aliases is not None else ()
    source = value._view_copy_of
    return _Wrapped(
        _result(value._local_tensor, trace, results),
        value._spec,
        tuple((mask, _result(alias, trace, results)) for mask, alias in masks),
        None if cached is None else _wrapped(cached, trace, results),
        None if source is None else _result(source, trace, results),
        value._local_escaped,
    )


def _result(tensor: Tensor, trace: TracedGraph, results: list[fx.Node]) -> int:
    """The place of a tensor among the results of the program."""
    node = trace.node_of(tensor)
    if node not in results:
        results.append(node)
    return results.index(node)


@dataclass(frozen=True)
class _Same:
    """An output that is one object at every call."""

    value: Any

    def __call__(self, flat: list[Any], results: Sequence[Any]) -> Any:
        return self.value


@dataclass(frozen=True)
class _Argument:
    """An output that is an argument of the call."""

    index: int

    def __call__(self, flat: list[Any], results: Sequence[Any]) -> Any:
        return flat[self.index]


@dataclass(frozen=True)
class _Plain:
    """An output that is a result, a plain tensor."""

    place: int

    def __call__(self, flat: list[Any], results: Sequence[Any]) -> Any:
        return results[self.place]


@dataclass(frozen=True)
class _Wrapped:
    """An output that is a new DTensor; the numbers are places among the results."""

    place: int
    spec: Spec
    aliases: tuple[tuple[int, int], ...]
    cached: _Wrapped | None
    view_copy_of: int | None
    escaped: bool

    def __call__(self, flat: list[Any], results: Sequence[Any]) -> Any:
        local = results[self.place]
        made = wrap(local, self.spec)
        if self.aliases:
            made._use_aliases = UseAliases(
                local, {mask: results[place] for mask, place in self.aliases}
            )
        if self.cached is not None:
            made._cached_redistribution = CachedRedistribution(local, self.cached(flat, results))
        if self.escaped:
            made._local_escaped = True
        if self.view_copy_of is not None:
            # Only the local tensor of the base counts, so any spec will do.
            mark_copy(made, wrap(results[self.view_copy_of], self.spec))
        return made
