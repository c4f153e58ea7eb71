"""Records what forwards write to modules' attributes and buffers, and restores it.

A forward that runs once more than on one device counts once more, by whatever it counts:
`self.load.add_(counts)`, `self.load = self.load + counts`, `self.steps += 1`, an entry of a dict.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from operator import is_not
from typing import Any, Final, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from vescale_parallel._pipeline.trace.tensor_specs import TensorSpec, bytes_of, local_of
from vescale_parallel._pipeline.trace.text import add_record

_OF_MODULES: Final = frozenset(vars(nn.Module()))
"""What every module has: its parameters, buffers, hooks and modules."""

_MISSING: Final[Any] = object()


@add_record
class Place(NamedTuple):
    """Where a module holds a value.

    Attributes:
        module: its name.
        name: of the attribute or buffer.
        is_buffer: which of them.
    """

    module: str
    name: str
    is_buffer: bool

    def value(self, model: nn.Module) -> Any:
        """What is there, for `put`; where nothing is, what stands for that."""
        return self.table(model).get(self.name, _MISSING)

    def put(self, model: nn.Module, value: Any) -> None:
        """Let the module hold a value that `value` has given."""
        _put(self.table(model), self.name, value)

    def table(self, model: nn.Module) -> dict[str, Any]:
        """What holds it: past `__setattr__`, by which modules sort parameters and modules out."""
        module = model.get_submodule(self.module)
        return module._buffers if self.is_buffer else vars(module)


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        table.pop(name, None)
    else:
        table[name] = value


@add_record
class Write(NamedTuple):
    """What a forward of a stage has written.

    Attributes:
        stage: which one.
        place: where.
        is_known: whether the stage knows the value: it may follow from those of other stages.
        spec: of a tensor in a buffer, what it is.
    """

    stage: int
    place: Place
    is_known: bool
    spec: TensorSpec | None


class State:
    """Attributes and buffers of a model as they are when this is made.

    Args:
        model: the model.
        places: those that are looked at; None: all.
    """

    def __init__(self, model: nn.Module, places: Iterable[Place] | None = None) -> None:
        self._model = model
        self._only = None if places is None else {one: one.table(model) for one in places}
        self._values = {one: table.get(one.name, _MISSING) for one, table in self._now().items()}
        # By `id`, which stays that of the object as long as its content holds it.
        self._contents: dict[int, _Content] = {}
        left = list(self._values.values())
        while left:
            value = left.pop()
            content = None if id(value) in self._contents else _content_of(value)
            if content is not None:
                self._contents[id(value)] = content
                left += content.inner

    def _now(self) -> dict[Place, dict[str, Any]]:
        return _places(self._model) if self._only is None else self._only

    def changed(self) -> set[int]:
        """Objects with another content now, by `id`."""
        return {at for at, content in self._contents.items() if content.has_changed()}

    def tensors(self, objects: set[int]) -> set[int]:
        """Those of the objects that are tensors."""
        return {one for one in objects if isinstance(self._contents[one].value, Tensor)}

    def written(self, changed: set[int] | None = None) -> dict[Place, Any]:
        """Where something else is now, or the same object with another content; and what."""
        changed = self.changed() if changed is None else changed
        found = {}
        for place, table in (self._now() | self._gone()).items():
            value, before = table.get(place.name, _MISSING), self._values.get(place, _MISSING)
            if value is not before or self._reaches(value, changed):
                found[place] = value
        return found

    def among(self, objects: set[int], places: Iterable[Place] | None = None) -> list[Place]:
        """Those of places, or of all, in which one of these objects was, given by `id`."""
        looked_at = self._values if places is None else places
        return [one for one in looked_at if self._reaches(self._values.get(one), objects)]

    def _gone(self) -> dict[Place, dict[str, Any]]:
        now = self._now()
        return {one: one.table(self._model) for one in self._values if one not in now}

    def _reaches(self, value: Any, objects: set[int]) -> bool:
        """Whether one of these objects is a value, or in it."""
        left, seen = [value] if objects else [], set()
        while left:
            one = id(left.pop())
            if one in objects:
                return True
            if one in self._contents and one not in seen:
                seen.add(one)
                left += self._contents[one].inner
        return False

    def restore(self) -> None:
        """Let modules hold the same objects, with the contents that they had."""
        for place in self.written():
            place.put(self._model, self._values.get(place, _MISSING))
        for at, content in self._contents.items():
            if content.has_changed():
                content.give_to(content.value)
                # That was a write as well.
                self._contents[at] = content._replace(version=_version_of(content.value))


def _places(model: nn.Module) -> dict[Place, dict[str, Any]]:
    """Where modules of a model hold attributes and buffers, each with what holds it."""
    return {
        Place(name, one, is_buffer): table
        for name, module in model.named_modules()
        for table, is_buffer in ((vars(module), False), (module._buffers, True))
        for one in table
        if is_buffer or one not in _OF_MODULES
    }


def copied(value: Any, made: dict[int, Any]) -> Any:
    """What may be written to in place of a value; the value itself where nothing can be.

    Args:
        value: what a module holds.
        made: copies by the `id` of what they are of: what several places hold is copied once.
    """
    content = _content_of(value)
    if content is None or isinstance(value, tuple):
        return value
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, Tensor):
        made[id(value)] = value.detach().clone()
        return made[id(value)]
    own = made[id(value)] = copy.copy(value)
    if isinstance(own, dict):
        own.update({key: copied(one, made) for key, one in own.items()})
    elif isinstance(own, list | deque):
        for at, one in enumerate(own):
            own[at] = copied(one, made)
    return own


def take_over(value: Any, other: Any) -> None:
    """Let a value have the content of a copy of it."""
    content = _content_of(other)
    if content is not None:
        content.give_to(value)


class _Content(NamedTuple):
    """What is in an object that can be written to.

    Attributes:
        value: the object.
        before: a copy of what is in it; of a tensor, of its local elements.
        inner: values in it that may be written to themselves.
        version: of a tensor, as torch counts writes.
    """

    value: Any
    before: Any
    inner: tuple[Any, ...] = ()
    version: int | None = None

    def has_changed(self) -> bool:
        """Whether something else is in it, beside what has changed within that."""
        value, before = self.value, self.before
        if isinstance(value, Tensor):
            # Versions do not tell all: torch's batch norm writes without counting, and so does what
            # is done to `.data`. Values do not either, where a microbatch happens to add nothing.
            return self.version != _version_of(value) or not _are_equal(local_of(value), before)
        if isinstance(value, numpy.ndarray):
            return bool(value.tobytes() != before.tobytes())
        if isinstance(value, set):
            return bool(value != before)
        if isinstance(value, dict):
            return list(value) != list(before) or any(map(is_not, value.values(), before.values()))
        return len(value) != len(before) or any(map(is_not, value, before))

    def give_to(self, value: Any) -> None:
        """Put the content into an object of this kind."""
        if isinstance(value, Tensor):
            with torch.no_grad():
                local_of(value).detach().copy_(self.before)
        elif isinstance(value, numpy.ndarray):
            value[...] = self.before
        elif isinstance(value, list | deque):
            value.clear()
            value.extend(self.before)
        elif isinstance(value, dict | set):
            value.clear()
            value.update(self.before)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    dense = one.layout is torch.strided and not (one.is_nested or one.is_quantized)
    # Bits, as NaN equals nothing.
    return not dense or torch.equal(bytes_of(one), bytes_of(other))


def _version_of(value: Any) -> int | None:
    # torch counts no writes to inference tensors.
    is_counted = isinstance(value, Tensor) and not value.is_inference()
    return value._version if is_counted else None


def _content_of(value: Any) -> _Content | None:
    """That of a tensor, array or container; of other objects nothing is known."""
    if isinstance(value, Tensor):
        if isinstance(value, nn.Parameter) or value.is_meta:
            return None
        return _Content(value, local_of(value).detach().clone(), version=_version_of(value))
    if isinstance(value, numpy.ndarray):
        return _Content(value, value.copy())
    if isinstance(value, list | deque | tuple):
        return _Content(value, list(value), tuple(value))
    if isinstance(value, dict):
        return _Content(value, dict(value), tuple(value.values()))
    return _Content(value, set(value)) if isinstance(value, set) else None
