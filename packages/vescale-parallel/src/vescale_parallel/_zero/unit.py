"""A unit: the parameters that are gathered as one, and where the modules of the model hold them.

Between calls the modules hold the stored parameters, which is what optimizers, `state_dict` and
users see. While the unit runs they hold DTensors of the gathered values, on the mesh of the
activations, and no line of the model needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_dtensor.storage import Gathering, local_leaf, local_leaves, permit_writes

from vescale_parallel._common.gradient_dtypes import gradient_dtype
from vescale_parallel._errors import StaleParameterError
from vescale_parallel._zero.flat_buffer import FlatBuffer, Reduction
from vescale_parallel._zero.gather import Early, early_node, gather_unit
from vescale_parallel._zero.parameter_writes import (
    DataUses,
    cast_again,
    is_written,
    moved_again,
    refuse_cast_writes,
    take_back,
)

_wants = attrgetter("requires_grad")

Places = tuple[tuple[nn.Module, str], ...]
"""Modules that hold one parameter, and under which names."""


@dataclass(frozen=True)
class UnitParameter:
    """A parameter of a unit.

    Attributes:
        name: its first name in the model.
        stored: the leaf that optimizers step.
        places: the modules that hold it, and under which name; several where it is shared.
        placements: of its gathered values on the mesh of the activations.
        compute: dtype that it is cast to where no buffer does so; None: that of what is stored.
    """

    name: str
    stored: nn.Parameter
    places: Places
    placements: tuple[Any, ...]
    compute: torch.dtype | None = None


class TakesParameters(Protocol):
    """A forward that asks its unit for gathered parameters."""

    @property
    def takes_parameters(self) -> bool:
        """Whether modules need not hold them meanwhile."""


class Unit:
    """The buffers of one module, and the parameters in them.

    Attributes:
        name: of the module.
        buffers: its flat buffers; each holds the parameters of one kind.
        held: the parameters: those of the first buffer, those of the second, and so on, then those
            that are on every rank in full and only change their mesh.
        mesh: of the activations.
        depth: how many calls of the module are running.
        is_swapped: whether the modules hold gathered parameters.
        forward: of the module, where it takes gathered parameters without their help.
        is_lent: whether it may take them now.
        ran_modules: whether modules computed in the last call, and may do so again in backward.
        syncs: whether a backward reduces gradients; `no_sync` sets it to False.
        before_reduce: called when all gradients of one run of the unit have arrived.
        after_nodes: called when its nodes are made, and nothing is computed yet.
        after_start: called when the reductions of one run have been started.
        data_uses: what `.data` of gathered parameters has handed out; see `parameter_writes`.
        cast_versions: of cast copies that were made anew amid a call, the version since when only
            modules have written to them.
        taken: names of those that were found to be written to, at the end of a call.
        collect: takes the gradients of each run in place of a reduction; None: they are reduced.
    """

    def __init__(
        self,
        name: str,
        buffers: list[FlatBuffer],
        held: list[UnitParameter],
        mesh: DeviceMesh,
    ) -> None:
        self.name, self.buffers, self.held, self.mesh = name, buffers, held, mesh
        self.depth = 0
        self.is_swapped = self.is_lent = False
        self.forward: TakesParameters | None = None
        self.ran_modules = True
        self._fulls: list[Tensor] | None = None
        self.data_uses: DataUses = []
        self.taken: set[str] = set()
        self.cast_versions: dict[str, int] = {}
        self._unwritable: list[Tensor] = []
        # Amid a step: what modules compute with.
        self._in_use: list[tuple[Tensor | None, list[Tensor]]] = []
        self._early: Early | None = None
        self.syncs = True
        self.before_reduce: Callable[[Unit], None] = _nothing
        self.after_nodes: Callable[[Unit], None] = _nothing
        self.after_start: Callable[[Unit], None] = _nothing
        self.collect: Callable[[Unit, Sequence[Tensor | None]], None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """A unit of the copied modules, on the same mesh."""
        # Process groups cannot be copied; copies compute on the same ranks.
        memo[id(self.mesh)] = self.mesh
        copied = Unit(self.name, [], [], self.mesh)
        # Before anything is copied that leads back here, as modules do.
        memo[id(self)] = copied
        copied.held = [
            UnitParameter(
                one.name,
                deepcopy(one.stored, memo),
                tuple((deepcopy(module, memo), name) for module, name in one.places),
                one.placements,
                one.compute,
            )
            for one in self.held
        ]
        copied.buffers = deepcopy(self.buffers, memo)
        copied.forward = deepcopy(self.forward, memo)
        return copied

    def start(self, *, anew: bool = True) -> None:
        """Start to gather what is not there, or (`anew`) what is old. Collective."""
        for buffer in self.buffers:
            buffer.start(anew=anew)

    def wait(self, *, anew: bool = True) -> None:
        """Have all gathered values. Collective."""
        if len(self.buffers) > 1:
            self.start(anew=anew)  # all of them before the first is waited for
        for buffer in self.buffers:
            buffer.wait(anew=anew)

    def release(self) -> None:
        """Give back what may be."""
        for buffer in self.buffers:
            buffer.release()

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        if self.buffers:
            return self.buffers[0].device
        return local_leaf(self.held[0].stored).device

    @property
    def is_missing(self) -> bool:
        """Whether something of it is neither gathered nor under way."""
        return any([one.full is None and one.pending is None for one in self.buffers])

    @property
    def is_written_unseen(self) -> bool:
        """Whether writes to something of it may go unseen: it is gathered when it is used."""
        return any([one.is_written_unseen for one in self.buffers])

    @cached_property
    def full_bytes(self) -> int:
        """Bytes of its gathered values while they are there."""
        return sum(one.row.gathered_bytes for one in self.buffers)

    @cached_property
    def packed_bytes(self) -> int:
        """Bytes of its gradients, packed to be reduced."""
        return sum(one.row.packed_bytes for one in self.buffers)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of gathered values that `release` would give back."""
        fulls = [one.full for one in self.buffers if not one.is_kept]
        return sum(one.numel() * one.element_size() for one in fulls if one is not None)

    @property
    def trains(self) -> bool:
        """Whether a backward will come to the node of this unit."""
        return True in map(_wants, local_leaves(self._stored))

    def views(self) -> list[Tensor]:
        """The gathered values, one for each held parameter, without a history."""
        views = [view for buffer in self.buffers for view in buffer.views()]
        kept = [(local_leaf(one.stored).detach(), one.compute) for one in self.held[len(views) :]]
        return views + [cast(leaf, dtype) for leaf, dtype in kept]

    @cached_property
    def _stored(self) -> list[nn.Parameter]:
        return [one.stored for one in self.held]

    @cached_property
    def _gathering(self) -> Gathering:
        # At the first use: while a model is copied, the copies have no parameters yet.
        return Gathering(self._stored, self.mesh, [one.placements for one in self.held])

    def aliases(self) -> tuple[list[Tensor], list[int]]:
        """The gathered values, an alias for each kind of use, and which get no gradient."""
        return self._gathering.aliases(self.views()), self._gathering.frozen()

    def pack(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Pack what arrived at aliases into the buffers; returns what belongs into none."""
        gradients = self._gathering.contributions(gradients)
        # Before memory is taken to pack gradients: the gathered values have served.
        self.before_reduce(self)
        if self.collect is not None:
            self.collect(self, gradients)
            return []
        start = 0
        for buffer in self.buffers:
            own = gradients[start : start + len(buffer.parameters)]
            start += len(own)
            if any([one is not None for one in own]):
                buffer.add_gradients(own, reduced_next=self.syncs)
        return list(gradients[start:])

    def start_reduce(self) -> Sequence[Reduction | None] | None:
        """Start to reduce what was packed, if it syncs. Collective then."""
        if self.collect is not None or not self.syncs:
            return None
        started = [buffer.start_reduce() for buffer in self.buffers]
        self.after_start(self)
        return started

    def reduce(
        self,
        kept: Sequence[Tensor | None],
        started: Sequence[Reduction | None] | None = None,
    ) -> list[Tensor | None]:
        """Gradients of what is stored, from what was packed. Collective, if it syncs.

        Args:
            kept: what belongs into no buffer.
            started: the reductions that `start_reduce` has started for this run.
        """
        if self.collect is not None:
            return [None] * len(self.held)
        found: list[Tensor | None] = []
        for at, buffer in enumerate(self.buffers):
            if started is not None:
                found += buffer.finish_reduce(started[at])
            else:
                # Not reduced: the gradients of the stored parameters stay as they are for now.
                found += buffer.reduced() if self.syncs else [None] * len(buffer.parameters)
        leaves = local_leaves(self._stored[len(found) :])
        pairs = zip(leaves, kept, strict=True)
        return found + [None if g is None else g.to(gradient_dtype(one)) for one, g in pairs]

    def fulls(self) -> list[Tensor]:
        """The gathered parameters, one for each that is held; the same ones until `swap_out`."""
        if self._fulls is None:
            self._fulls = self.made()
            self._unwritable = refuse_cast_writes(self, self._fulls)
        return self._fulls

    def made(self) -> list[Tensor]:
        """Make the gathered parameters, recorded where gradients are."""
        leaves = local_leaves(self._stored)
        # Of this run alone: the next one has nodes of its own.
        early, self._early = self._early, None
        fulls: list[Any] = list(self.wrapped(gather_unit(self, leaves, early)))
        self.after_nodes(self)
        for full in fulls:
            # `isinstance(weight, nn.Parameter)` in a forward is true of it, as on one device.
            full._is_param = True
        return fulls

    def prepare(self) -> None:
        """Make the node at the end of its backward now, so that the engine comes to it later."""
        if self._early is None and torch.is_grad_enabled():
            self._early = early_node(self, local_leaves(self._stored))

    def forget_prepared(self) -> None:
        """The run that it was made for has not come."""
        self._early = None

    def wrapped(self, aliases: Sequence[Tensor]) -> Sequence[Tensor]:
        """What modules hold of the gathered values."""
        return self._gathering.wrapped(aliases, self.data_uses)

    def dropped(self, fulls: Sequence[Tensor]) -> None:
        """Nobody uses any more what `made` has returned: what was written to it is taken back."""
        if is_written(self, fulls):
            take_back(self, fulls)

    def before_step(self) -> None:
        """An optimizer is about to step amid a call: what modules have written comes first."""
        self._in_use = [(one.full, one.handed) for one in self.buffers]
        if self._fulls is not None:
            self.dropped(self._fulls)

    def after_step(self, stepped: Sequence[FlatBuffer]) -> None:
        """An optimizer has stepped amid a call: modules go on with new values. Collective."""
        at = 0
        for buffer, (full, handed) in zip(self.buffers, self._in_use, strict=True):
            if full is not None and any([buffer is one for one in stepped]):
                buffer.gather_again(full, handed)
                if self._fulls is not None:
                    moved_again(buffer, self._fulls[at : at + len(handed)])
            at += len(buffer.parameters)
        self._in_use = []
        if self._fulls is not None:
            cast_again(self, self.held[at:], self._fulls[at:])

    def lend(self) -> None:
        """Let the forward take the gathered parameters, or else the modules hold them."""
        if self.forward is not None and self.forward.takes_parameters:
            self.is_lent = True
        else:
            self.swap_in()

    def swap_in(self) -> None:
        """Let the modules hold the gathered parameters."""
        fulls = self.fulls()
        # Before the first of them: an error in between leaves something to swap out.
        self.is_swapped = True
        put_all([one.places for one in self.held], fulls)

    def swap_out(self) -> None:
        """Let the modules hold the stored parameters again, with what was written to gathered ones.

        Raises:
            ParallelError, RuntimeError: that cannot be stored; see `parameter_writes`. The modules
                hold them all the same.
        """
        if self.is_swapped:
            put_all([one.places for one in self.held], [one.stored for one in self.held])
        self.is_swapped = self.is_lent = False
        fulls, self._fulls = self._fulls, None
        if fulls is not None:
            for memory in self._unwritable:
                permit_writes(memory)
            self._unwritable = []
            self.dropped(fulls)
            self.cast_versions = {}

    def require_stored(self) -> None:
        """Refuse to run when a module holds another parameter than the stored one.

        Raises:
            StaleParameterError: one was replaced: `load_state_dict(assign=True)`, or by assignment.
        """
        for one in self.held:
            for module, name in one.places:
                held = module._parameters
                if name not in held or held[name] is not one.stored:
                    if name not in held:
                        raise StaleParameterError(
                            f"parameter '{one.name}' was taken out of its module after "
                            "parallelize, as prune, weight_norm and parametrizations do: what is "
                            "gathered comes back under that name. Call these before parallelize, "
                            "and undo them (prune.remove) where the model is whole again."
                        )
                    raise StaleParameterError(
                        f"parameter '{one.name}' was replaced by another object after parallelize: "
                        "its values are in a buffer that is gathered, and the new object's are "
                        "not. Write into it: p.copy_(values) under torch.no_grad(), or "
                        "load_state_dict(...) without assign=True."
                    )


def cast(leaf: Tensor, dtype: torch.dtype | None) -> Tensor:
    """What modules compute with of a parameter that no buffer holds; None: with itself."""
    if dtype is None:
        return leaf
    if not torch.is_inference_mode_enabled():
        return leaf.to(dtype)
    # Tensors of inference mode count no writes.
    with torch.inference_mode(False), torch.no_grad():
        return leaf.to(dtype)


def put_all(places: Sequence[Places], tensors: Sequence[Tensor]) -> None:
    """Let modules hold these tensors as their parameters."""
    # Without a call for each: this happens to every parameter several times a step.
    for those, tensor in zip(places, tensors, strict=True):
        for module, name in those:
            # Past `register_parameter`, which refuses tensors with a history.
            module._parameters[name] = tensor  # type: ignore[assignment]
            if "_flat_weights_names" in module.__dict__:
                _tell_list_of_weights(module, name, tensor)


def _tell_list_of_weights(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Let a module that keeps its weights in a list too, as torch's LSTM does, find the new one."""
    # Not by getattr, which asks a module's `__getattr__`, for every parameter at every step.
    held = vars(module)
    names, weights = held.get("_flat_weights_names"), held.get("_flat_weights")
    if isinstance(names, list) and isinstance(weights, list) and name in names:
        weights[names.index(name)] = tensor


def _nothing(unit: Unit) -> None:
    pass
