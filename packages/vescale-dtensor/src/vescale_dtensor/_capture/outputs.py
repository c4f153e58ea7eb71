"""What a replay returns: how each output is made of what the program gives and the call was given.

An output that is an argument, or was there before, is that very object again. A new DTensor gets a
new wrapper, with the faces that the program made of it, so that later uses share its gradient's
reduction as they do in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vescale_dtensor._autograd.redistribution_cache import Remembered
from vescale_dtensor._autograd.uses import Faces
from vescale_dtensor._capture.graph import Trace
from vescale_dtensor._capture.unsupported import refused
from vescale_dtensor._capture.wrapper_snapshot import brought
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._tensor.copied_views import mark_copy
from vescale_dtensor._tensor.dtensor import DTensor, wrap

Make = Callable[[list[Any], Sequence[Any]], Any]
"""An output, of the flat arguments of the call and the results of the program."""


@dataclass(frozen=True)
class Outputs:
    """How to put the outputs together.

    Attributes:
        makes: one for each flat output.
        form: how they are put together; None for a single tensor.
    """

    makes: tuple[Make, ...]
    form: TreeSpec | None

    def __call__(self, flat: list[Any], results: Sequence[Any]) -> Any:
        """The outputs of one replay."""
        if self.form is None:
            return self.makes[0](flat, results)
        return tree_unflatten([make(flat, results) for make in self.makes], self.form)


def tensors_in(outputs: Any) -> list[Tensor]:
    """The tensors among the outputs."""
    return [value for value in tree_flatten(outputs)[0] if isinstance(value, Tensor)]


def plan_outputs(outputs: Any, flat: list[Any], trace: Trace) -> tuple[Outputs, list[fx.Node]]:
    """How to make the outputs of a replay, and the nodes whose values it needs.

    Raises:
        CaptureError: an output that a replay could not make anew.
    """
    results: list[fx.Node] = []
    values, form = tree_flatten(outputs)
    makes = tuple(_make(value, flat, trace, results) for value in values)
    return Outputs(makes, None if isinstance(outputs, Tensor) else form), results


def _make(value: Any, flat: list[Any], trace: Trace, results: list[fx.Node]) -> Make:
    if not isinstance(value, Tensor):
        return _Same(value)
    for index, argument in enumerate(flat):
        if argument is value:
            return _Argument(index)
    if value in trace.before:
        return _Same(value)
    if not isinstance(value, DTensor):
        return _Plain(_result(value, trace, results))
    if value._gradient_of is not None:
        raise refused("the gradient of a parameter is returned; read p.grad after the call")
    return _wrapped(value, trace, results)


def _wrapped(value: DTensor, trace: Trace, results: list[fx.Node]) -> _Wrapped:
    faces, remembered = brought(value)
    masks = faces.by_mask.items() if faces is not None else ()
    source = value._copied_from
    return _Wrapped(
        _result(value._local_tensor, trace, results),
        value._spec,
        tuple((mask, _result(face, trace, results)) for mask, face in masks),
        None if remembered is None else _wrapped(remembered, trace, results),
        None if source is None else _result(source, trace, results),
        value._exposed,
    )


def _result(tensor: Tensor, trace: Trace, results: list[fx.Node]) -> int:
    node = trace.node_of(tensor)
    if node not in results:
        results.append(node)
    return results.index(node)


@dataclass(frozen=True)
class _Same:
    value: Any

    def __call__(self, flat: list[Any], results: Sequence[Any]) -> Any:
        return self.value


@dataclass(frozen=True)
class _Argument:
    index: int

    def __call__(self, flat: list[Any], results: Sequence[Any]) -> Any:
        return flat[self.index]


@dataclass(frozen=True)
class _Plain:
    place: int

    def __call__(self, flat: list[Any], results: Sequence[Any]) -> Any:
        return results[self.place]


@dataclass(frozen=True)
class _Wrapped:
    place: int
    spec: Spec
    faces: tuple[tuple[int, int], ...]
    remembered: _Wrapped | None
    copied: int | None
    exposed: bool

    def __call__(self, flat: list[Any], results: Sequence[Any]) -> Any:
        local = results[self.place]
        made = wrap(local, self.spec)
        if self.faces:
            made._faces = Faces(local, {mask: results[place] for mask, place in self.faces})
        if self.remembered is not None:
            made._remembered = Remembered(local, self.remembered(flat, results))
        if self.exposed:
            made._exposed = True
        if self.copied is not None:
            mark_copy(made, wrap(results[self.copied], self.spec))
        return made
