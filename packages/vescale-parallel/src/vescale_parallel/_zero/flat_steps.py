"""Optimizers that go element by element step flat buffers: one plain tensor for each, no wrapper.

An optimizer of torch looks at every parameter in Python several times a step, and each of its
operations goes through a wrapper. Where its update of an element depends on nothing but that
element's values, the memory of a whole buffer can be stepped at once. So before a step a helper of
the same class is put in the optimizer's place: it has the optimizer's settings, and per buffer one
tensor, gradient and state. The optimizer, its groups, and what it remembers of each parameter are
never changed meanwhile, whatever raises.

States stay under their parameters, as DTensors: from the second step on these are views of one flat
tensor a buffer, as parameters are of the shard. Whatever was put in their place (a loaded state,
say) is copied there again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from vescale_dtensor import DTensor, local_leaves, note_written

from vescale_parallel._common.optimizer_hooks import Args, Call
from vescale_parallel._common.torch_compat import has_step_hooks
from vescale_parallel._zero.flat_buffer import FlatBuffer

_KINDS: Final = ("Adadelta", "Adagrad", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "SGD")
"""By exact type: a subclass may do anything."""

ELEMENTWISE: Final = frozenset(
    kind for name in _KINDS if (kind := getattr(torch.optim, name, None)) is not None
)
"""Optimizers that update each element by its own gradient and state alone."""

_Ids = list[list[int]]


def can_be_helped(optimizer: Optimizer, args: Args, kwargs: dict[str, Any]) -> bool:
    """Whether a helper of its class can make a step in an optimizer's place.

    Args:
        optimizer: whose step it is.
        args: of `step`, itself first.
        kwargs: of `step`.
    """
    if type(optimizer) not in ELEMENTWISE:
        return False
    # A closure computes gradients within the step, and other hooks may change them there.
    # Another optimizer in its place: tensors of a second model are stepped already.
    if len(args) != 1 or args[0] is not optimizer or has_step_hooks(optimizer):
        return False
    return all([value is None for value in kwargs.values()])


def helper_of(optimizer: Any, groups: list[dict[str, Any]], states: States) -> Any:
    """An optimizer of the same class and settings that steps other tensors.

    Args:
        optimizer: in whose place it steps; it is not changed.
        groups: parameters and settings.
        states: of these parameters.
    """
    helper: Any = object.__new__(type(optimizer))
    # Also what a GradScaler has left there for a fused step.
    vars(helper).update(vars(optimizer))
    helper.param_groups, helper.state = groups, states
    return helper


class FlatSteps:
    """Steps of optimizers on the buffers of one model."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Optimizer, _Stepped] = weakref.WeakKeyDictionary()

    def begin(
        self, optimizer: Optimizer, buffers: Sequence[FlatBuffer], args: Args, kwargs: Any
    ) -> Call | None:
        """Return what `step` is to be called with in place of these; None: with these.

        No communication. Gradients are complete.

        Args:
            optimizer: whose step it is.
            buffers: those of which it steps parameters.
            args: of `step`, itself first.
            kwargs: of `step`.
        """
        if not buffers or not can_be_helped(optimizer, args, kwargs):
            return None
        known = self._of.get(optimizer)
        if known is None:
            known = self._of[optimizer] = _Stepped()
        with torch.no_grad():
            helper = known.helper(optimizer, buffers)
        return None if helper is None else ((helper,), kwargs)

    def end(self, optimizer: Optimizer, args: Args) -> None:
        """The step is done."""
        known = self._of.get(optimizer)
        if known is not None and args and args[0] is known.running:
            with torch.no_grad():
                known.end(optimizer)


class _Stepped:
    """One optimizer.

    Attributes:
        running: what steps in its place at the moment.
    """

    def __init__(self) -> None:
        self.running: Any = None
        self._ids: _Ids = []
        self._groups: list[list[FlatBuffer]] = []
        self._states: dict[int, _FlatState] = {}
        self._stepped: list[_Running] = []

    def helper(self, optimizer: Any, buffers: Sequence[FlatBuffer]) -> Any:
        """What steps in the optimizer's place; None where no buffer can be stepped flat."""
        ids = [list(map(id, group["params"])) for group in optimizer.param_groups]
        if ids != self._ids:  # groups are added and changed while training
            self._ids, self._groups = ids, _groups_of(ids, buffers)
        self._stepped = []
        groups: list[dict[str, Any]] = []
        states = States(optimizer.state)
        for group, own in zip(optimizer.param_groups, self._groups, strict=True):
            flats: list[Tensor] = []
            parameters: set[int] = set()
            for buffer in () if group.get("differentiable") else own:
                flat = self._flat(optimizer, group, buffer)
                if flat is not None:
                    flats.append(flat.parameter)
                    states[flat.parameter] = flat.state
                    parameters.update(map(id, buffer.parameters))
            # Apart: lists of plain tensors and of DTensors do not mix.
            if flats:
                groups.append({**group, "params": flats})
            rest = [one for one in group["params"] if id(one) not in parameters]
            if rest or not flats:
                groups.append({**group, "params": rest})
        if not self._stepped:
            return None
        self.running = helper_of(optimizer, groups, states)
        return self.running

    def _flat(self, optimizer: Any, group: dict[str, Any], buffer: FlatBuffer) -> _Flat | None:
        """A buffer as one parameter, with its gradient; None: it is not stepped as one."""
        # Such facts are equal on all ranks of a program that has not drifted, other than where
        # memory is: a rank that owns nothing of a parameter would find that always right.
        shard, leaves = buffer.current_shard()
        gradients = [one.grad for one in leaves]
        if any([one is None for one in gradients]):
            return None  # left out of this step, as on one device
        if len({one.dtype for one in gradients if one is not None}) > 1:
            return None  # as parameters keep them (`grad_dtype`)
        state = self._states.get(id(buffer))
        if state is None or not state.is_in_place(optimizer, shard):
            made = _FlatState.made(optimizer, group, buffer, shard)
            if made is None:
                self._states.pop(id(buffer), None)
                return None
            state = self._states[id(buffer)] = made
        gradient, is_copy = _flat_gradient(buffer, shard, gradients)
        if gradient.dtype is not shard.dtype:
            shard.grad_dtype = gradient.dtype
        shard.grad = gradient
        self._stepped.append((buffer, leaves, state, shard, gradient if is_copy else shard))
        return _Flat(shard, state.flat)

    def end(self, optimizer: Any) -> None:
        """Tell of what was written to."""
        self.running = None
        leaves: list[Tensor] = []
        for buffer, own, state, shard, gradient in self._stepped:
            leaves += own
            if gradient is not shard and getattr(optimizer, "grad_scale", None) is not None:
                # A fused step takes the scale out of what it is given.
                _copy_back(buffer, gradient)
            shard.grad = None
            state.tell_counts()
            note_written(buffer.parameters[0], f"{type(optimizer).__name__}.step")
        self._stepped = []
        # The memory was written to by another tensor: a graph of before the step is refused.
        increment_version(leaves)


_Running = tuple[FlatBuffer, list[Tensor], "_FlatState", Tensor, Tensor]
"""A buffer that is stepped, its leaves, state and shard, and the gradient where that is a copy."""


@dataclass(frozen=True)
class _Flat:
    """A buffer as one parameter, and its state."""

    parameter: Tensor
    state: dict[str, Tensor]


class States(dict[Any, Any]):
    """States of a helper: its own, and those of the optimizer for parameters that both have."""

    def __init__(self, others: Any) -> None:
        super().__init__()
        self._others = others

    def __missing__(self, parameter: Any) -> Any:
        return self._others[parameter]


class _FlatState:
    """What an optimizer remembers of a buffer's parameters, as flat tensors.

    Attributes:
        flat: by name, for the flat parameter.
    """

    def __init__(self, buffer: FlatBuffer, like: Tensor) -> None:
        self.flat: dict[str, Tensor] = {}
        self._buffer, self._like = buffer, (like.dtype, like.device)
        # The parameters, and what is remembered of each.
        self._parameters: list[Any] = []
        self._held: list[Any] = []
        # By name, the tensors of all parameters, and for each its address.
        self._tensors: list[tuple[str, list[Tensor], list[int]]] = []
        self._counts: list[tuple[str, list[Tensor], Tensor, list[int]]] = []

    @classmethod
    def made(
        cls, optimizer: Any, group: dict[str, Any], buffer: FlatBuffer, shard: Tensor
    ) -> _FlatState | None:
        """Copy the states into flat tensors; None where they are not alike for all parameters."""
        held = [optimizer.state.get(one) or {} for one in buffer.parameters]
        names = list(held[0])
        if any(type(one) is not dict or list(one) != names for one in held):
            return None
        # The first step makes states, for each parameter. SGD without momentum keeps none.
        if not names and not (type(optimizer) is torch.optim.SGD and not group["momentum"]):
            return None
        found = cls(buffer, shard)
        columns = {name: [one[name] for one in held] for name in names}
        if not all(found._can_take(values) for values in columns.values()):
            return None
        for name, values in columns.items():
            found._take(name, values, shard)
        found._parameters, found._held = list(buffer.parameters), held
        return found

    def _can_take(self, values: list[Any]) -> bool:
        pairs: Any = zip(values, self._buffer.parameters, strict=True)
        if all(isinstance(one, DTensor) for one in values):
            alike = all(
                one.shape == p.shape and one.placements == p.placements and not one.requires_grad
                for one, p in pairs
            )
            return alike and len({one.dtype for one in values}) == 1
        plain = all(type(one) is Tensor and not one.ndim for one in values)
        return plain and len({(one.dtype, one.device) for one in values}) == 1 and _are_one(values)

    def _take(self, name: str, values: list[Any], shard: Tensor) -> None:
        """Let the values be views of one tensor."""
        if isinstance(values[0], DTensor):
            flat = shard.new_zeros(shard.shape, dtype=values[0].dtype)
            for local, place in zip(
                local_leaves(values), self._buffer.shards_of(flat), strict=True
            ):
                place.copy_(local)
                # The tensor stays the same object, as a user may hold it.
                local.data = place
            addresses = [one.data_ptr() for one in local_leaves(values)]
            self._tensors.append((name, values, addresses))
            self.flat[name] = flat
            return
        counts = torch.stack(values)
        for index, value in enumerate(values):
            value.data = counts[index]
        self.flat[name] = counts[0].clone()
        self._counts.append((name, values, counts, [one._version for one in values]))

    def is_in_place(self, optimizer: Any, shard: Tensor) -> bool:
        """Whether all values are still views of the flat tensors, and counts are alike."""
        if (shard.dtype, shard.device) != self._like:
            return False
        state = optimizer.state
        # By `map`, without a line of Python for each parameter and name in every step.
        if not all(map(is_, map(state.get, self._parameters), self._held)):
            return False
        if set(map(len, self._held)) != {len(self.flat)}:
            return False
        for name, values, addresses in self._tensors:
            if not self._are_held(name, values):
                return False
            if list(map(Tensor.data_ptr, local_leaves(values))) != addresses:
                return False
        for name, values, _, versions in self._counts:
            if not self._are_held(name, values):
                return False
            # Written to by somebody else: perhaps not all of them.
            if [one._version for one in values] != versions:
                return False
        return True

    def _are_held(self, name: str, values: list[Any]) -> bool:
        return all(map(is_, map(dict.get, self._held, repeat(name)), values))

    def tell_counts(self) -> None:
        """Let the counts of all parameters be that of the flat one."""
        for name, _, counts, _ in self._counts:
            # By a tensor of its own, so that a write by anybody else shows in their versions.
            counts.copy_(self.flat[name])


def _groups_of(ids: _Ids, buffers: Iterable[FlatBuffer]) -> list[list[FlatBuffer]]:
    """For each group the buffers of which it has all parameters, each of them once."""
    found: list[list[FlatBuffer]] = []
    candidates = list(buffers)
    for own in ids:
        known = set(own)
        whole = len(known) == len(own)
        found.append(
            [b for b in candidates if whole and all(id(one) in known for one in b.parameters)]
        )
    return found


def _flat_gradient(
    buffer: FlatBuffer, shard: Tensor, gradients: Sequence[Any]
) -> tuple[Tensor, bool]:
    """The gradient of the shard, and whether it is a copy of those of the parameters."""
    # Mostly they are the views of one reduction.
    size, base = gradients[0].element_size(), None
    for gradient, (at, end) in zip(gradients, buffer.owned, strict=True):
        if end > at:
            start = gradient.data_ptr() - at * size
            if base is None:
                base, first, offset = start, gradient, at
            elif start != base:
                break
    else:
        if base is not None:
            begin = first.storage_offset() - offset
            storage = first.untyped_storage().nbytes()
            if begin >= 0 and (begin + shard.numel()) * size <= storage:
                return first.as_strided((shard.numel(),), (1,), begin), False
    copied = shard.new_zeros(shard.shape, dtype=gradients[0].dtype)
    for gradient, place in zip(gradients, buffer.shards_of(copied), strict=True):
        dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
        place.copy_(dense.reshape(-1))
    return copied, True


def _copy_back(buffer: FlatBuffer, gradient: Tensor) -> None:
    pairs = zip(buffer.locals, buffer.shards_of(gradient), strict=True)
    for leaf, place in pairs:
        if leaf.grad is not None:
            leaf.grad.copy_(place.view(leaf.grad.shape))


def _are_one(values: Sequence[Tensor]) -> bool:
    """Whether tensors without dims have one value."""
    # In one piece: on a device each comparison would wait for it.
    together = torch.stack(list(values))
    return bool((together == together[0]).all())
