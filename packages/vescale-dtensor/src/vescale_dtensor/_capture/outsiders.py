"""Guards of what code can ask of tensors beside their values: of those that no step uses, too.

A function may branch on `weight.requires_grad` without using the weight, on `x.grad is None` of an
argument, or on `x is self.last`. No step of a program shows that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._capture.call_key import KeyedCall
from vescale_dtensor._capture.free_tensors import FreeTensors, state_of
from vescale_dtensor._capture.kinds import kind_of_class
from vescale_dtensor._capture.reads import StateReads
from vescale_dtensor._capture.recorder import Recorder
from vescale_dtensor._tensor.dtensor import DTensor


class Given:
    """The arguments of a call, before the function ran.

    Args:
        call: it.
    """

    def __init__(self, call: KeyedCall) -> None:
        self.call, self.flat = call, call.flat
        flat = call.flat
        self.tensors = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]
        self.gradients = [_gradient_state(flat[i]) for i in self.tensors]
        # Objects are compared by what they are made of, so only their identity is asked here.
        kinds = ("tensor", "object")
        self.objects = [i for i, v in enumerate(flat) if kind_of_class(type(v)) in kinds]


class Outsiders:
    """What code could ask of tensors from outside, and of arguments.

    Args:
        reads: what the recording met.
        recorder: which tensors are arguments of the program, and what code asked of tensors.
        given: the arguments of the call.
    """

    def __init__(self, reads: StateReads, recorder: Recorder, given: Given) -> None:
        gradients = recorder.gradients
        met = self._all = reads.tensors.holders()
        self._tensors = given.tensors
        # Held, so that no other tensor gets the address of one.
        self._others = list(met)
        self._gradients = gradients
        self._states: list[Any] = []
        self._unused = FreeTensors((), gradients=False, forgotten=())
        # Not unless code asks: batches are slices of one tensor.
        self._offsets = recorder.offsets
        self._begins = self._offsets_of(given.tensors, given.flat)
        self._leaves = list(zip(given.tensors, given.gradients, strict=True)) if gradients else []
        # Objects are arguments by what they are made of. Code may ask which object one is.
        self._places = given.objects
        classes = {type(given.flat[i]) for i in given.objects} - {Tensor, DTensor}
        # Lists and dicts are arguments by what is in them.
        self._asks_identity = reads.identity
        containers = list(_containers((given.call.args, given.call.kwargs)))
        classes |= set(map(type, containers)) if reads.identity else set()
        self._met = {id(v): v for v in (*met, *reads.met_of(classes))}
        self._which = self._identities_of(given.call)
        self._identities = [self._met.get(id(given.flat[i])) for i in self._places]

    def leave_to(self, free: Iterable[Tensor]) -> None:
        """Leave these tensors to `FreeTensors`: those that a step of the finished program uses."""
        # Not those of the recording: a step whose result decides a branch is dead code afterwards.
        used = set(map(id, free))
        self._others = [tensor for tensor in self._others if id(tensor) not in used]
        # After the run: what the function itself changed of a tensor was a step that used it.
        rows = [(one, state_of(one), None) for one in self._others]
        # Compared as those are that the program uses: without a call for each.
        self._unused = FreeTensors(rows, gradients=False, forgotten=())
        if self._gradients:
            self._states = [_gradient_state(tensor) for tensor in self._others]

    def _offsets_of(self, places: list[int], flat: list[Any]) -> list[int]:
        """Where arguments, and tensors from outside, begin in memory."""
        if not self._offsets:
            return []
        tensors = [flat[i] for i in places] + self._all
        return [int(t.storage_offset()) for t in map(_local, tensors) if _is_strided(t)]

    def _same_others(self) -> bool:
        """Whether tensors from outside that no step uses are what code would find them to be."""
        return self._unused.matching_locals() is not None and (
            not self._gradients or [_gradient_state(t) for t in self._others] == self._states
        )

    def _identities_of(self, call: KeyedCall) -> list[Any]:
        """Which list or dict each one among the arguments is: an earlier one, one from outside."""
        if not self._asks_identity:
            return []
        first: dict[int, int] = {}
        found = map(id, _containers((call.args, call.kwargs)))
        # What was met is held, so its address is its own.
        return [(first.setdefault(key, i), key in self._met and key) for i, key in enumerate(found)]

    def hold(self, call: KeyedCall) -> bool:
        """Whether all of it is as it was, for a call."""
        met, flat = self._met, call.flat
        return (
            all(map(is_, map(met.get, map(id, [flat[i] for i in self._places])), self._identities))
            and self._same_others()
            and all(_gradient_state(flat[i]) == state for i, state in self._leaves)
            and self._offsets_of(self._tensors, flat) == self._begins
            and self._identities_of(call) == self._which
        )


def _containers(tree: Any) -> Iterator[Any]:
    """The lists and dicts in nested arguments, from the outside to the inside."""
    if isinstance(tree, list | dict):
        yield tree
    for item in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(item, list | dict | tuple):
            yield from _containers(item)


def _gradient_state(tensor: Tensor) -> Any:
    """Whether a leaf has a gradient; None of what is no leaf, and warns when asked."""
    # Of the local tensor: asking a wrapper for its gradient may communicate.
    local = _local(tensor)
    return (local.grad is None) if local.is_leaf else None


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided
