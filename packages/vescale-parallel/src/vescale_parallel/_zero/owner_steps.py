"""`torch.optim.Muon` on matrices that `zero` shards: each is stepped in full, by its owner.

Muon orthogonalises a matrix, which no shard of it tells. So a helper steps plain matrices; see
`plain_steps`. One that a rank owns in full is stepped there; any other is gathered, stepped on
every rank alike, and sharded again. States stay under their parameters, as DTensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from vescale_dtensor import DTensor, distribute_tensor, gradient_total
from vescale_dtensor.storage import local_leaf

from vescale_parallel._common.optimizer_hooks import Watcher
from vescale_parallel._common.plain_steps import Given, Helped
from vescale_parallel._errors import ParallelError
from vescale_parallel._zero.flat_buffer import FlatBuffer

MUON: Final[Any] = getattr(torch.optim, "Muon", None)
_STATE = "momentum_buffer"


class OwnedGroups(Helped):
    """The groups of one Muon: of each the matrices that are sharded."""

    refusal = (
        "Muon.step on parameters that zero shards takes their gradients before it begins: compute "
        "the loss and its backward before step(), without a closure, and change gradients there "
        "and not in a hook of the step."
    )

    def take(
        self, optimizer: Any, at: int, group: dict[str, Any], of: Sequence[FlatBuffer]
    ) -> tuple[Given, list[Any]]:
        """Matrices in full, and the parameters that nothing shards."""
        # By id: whether its owner has the global matrix; another axis may shard it besides.
        stored = {
            id(parameter): buffer.row.owned and tuple(parameter.shape) == slot.shape
            for buffer in of
            for parameter, slot in zip(buffer.parameters, buffer.row.plan.slots, strict=True)
        }
        taken: Given = {}
        own = [p for p in group["params"] if id(p) in stored and p.grad is not None]
        for parameter in own:
            part = _matrix(optimizer, parameter, stored[id(parameter)])
            self.parts.append(part)
            taken.update(part.given)
        if own and not taken:
            # Settings that Muon refuses are refused on ranks that own nothing, too.
            value, gradient, momentum = own[0].to_local().new_zeros(3, 1, 1)
            value.grad = gradient
            taken = {value: {_STATE: momentum}}
        return taken, [one for one in group["params"] if id(one) not in stored]


@dataclass(frozen=True)
class _Matrix:
    """A parameter that is stepped.

    Attributes:
        given: it in full, with its momentum; empty where another rank owns it.
        sharded: the parameter and its momentum, if the full ones are copies.
        leaf: its memory on this rank.
    """

    given: Given
    sharded: Sequence[DTensor]
    leaf: Tensor

    def end(self, optimizer: Optimizer) -> None:
        """Tell of what was written to."""
        if self.sharded:
            ((value, state),) = self.given.items()
            for full, held in zip((value, state[_STATE]), self.sharded, strict=True):
                # No source rank: all have computed the same.
                where = held.device_mesh, held.placements
                held.copy_(distribute_tensor(full, *where, src_data_rank=None))
        else:
            # On every rank, as if each had written: a graph of before the step is refused on all.
            increment_version(self.leaf)


def _matrix(optimizer: Optimizer, parameter: Any, is_owned: bool) -> _Matrix:
    # On every rank: where another axis only replicates, this is a collective.
    gradient: Any = gradient_total(parameter)
    state: Any = optimizer.state[parameter]
    if _STATE not in state:
        state[_STATE] = torch.zeros_like(gradient)
    leaf, stored = local_leaf(parameter), (parameter.detach(), state[_STATE])
    if not is_owned:
        value, slope, momentum = (
            one.full_tensor().clone() for one in (stored[0], gradient, stored[1])
        )
    elif leaf.numel():
        # Views of the stored memory: what is stepped is what the next gather sends.
        local = (leaf.detach(), gradient.to_local(), stored[1].to_local())
        value, slope, momentum = (one.view(parameter.shape) for one in local)
    else:
        return _Matrix({}, (), leaf)
    value.grad_dtype = slope.dtype
    value.grad = slope
    return _Matrix({value: {_STATE: momentum}}, () if is_owned else stored, leaf)


class RefusedMuon(Watcher):
    """Refuses a Muon's step of some parameters of a model in stages, on every rank.

    Each stage would gather other matrices at the same time, which ranks that compare what they
    execute take for programs that have diverged. To be told of steps before the units of
    `zero` are, so that nothing is reduced or stepped by then.

    Args:
        model: of which every rank has all parameters by name.
        names: of those that `zero` shards on any stage, so that all ranks refuse alike.
    """

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        self._model, self._names = weakref.ref(model), names

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Refuse it."""
        model = self._model()
        if type(optimizer) is not MUON or model is None:
            return
        stored = {id(one) for name, one in model.named_parameters() if name in self._names}
        if any(id(one) in stored for group in optimizer.param_groups for one in group["params"]):
            raise ParallelError(
                "Muon.step: parameters of a model in stages that zero shards are gathered by each "
                "stage for itself, which is not done yet. Leave zero out of the plan (Muon then "
                "steps each stage's own matrices), or the pipeline, or use another optimizer."
            )
