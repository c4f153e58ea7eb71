"""`torch.optim.Muon` on matrices that `zero` shards: each is stepped in full, by its owner.

Muon orthogonalises a matrix, which no shard of it tells. So just before its step the gradients are
taken aside, a Muon of the same settings steps plain tensors, and the optimizer itself finds nothing
to do. A matrix that one rank owns in full is stepped there; any other is gathered, stepped on every
rank alike, and sharded again. States stay under their parameters, as DTensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from vescale_dtensor import DTensor, distribute_tensor, gradient_total
from vescale_dtensor.storage import local_leaf

from vescale_parallel._common.torch_compat import has_step_hooks
from vescale_parallel._errors import ParallelError
from vescale_parallel._zero.flat_buffer import FlatBuffer

_MUON: Any = getattr(torch.optim, "Muon", None)
_STATE = "momentum_buffer"

Taken = list[tuple[nn.Parameter, Tensor]]
"""Parameters whose gradients were taken aside, and these."""


def step_owned(
    optimizer: Optimizer, buffers: Iterable[FlatBuffer], args: Any, kwargs: Any
) -> Taken:
    """Step what needs full matrices; call `give_back` after the optimizer's own step.

    Args:
        optimizer: any; only a `torch.optim.Muon` is helped.
        buffers: those of which it steps parameters.
        args: of its `step`.
        kwargs: of its `step`.

    Raises:
        ParallelError: on every rank: gradients would come, or change, within the step.
    """
    if type(optimizer) is not _MUON:
        return []
    # By id: whether its owner has the global matrix; another axis may shard it besides.
    stored = {
        id(parameter): buffer.row.owned and tuple(parameter.shape) == slot.shape
        for buffer in buffers
        for parameter, slot in zip(buffer.parameters, buffer.row.plan.slots, strict=True)
    }
    if not stored:
        return []
    if args or kwargs.get("closure") or has_step_hooks(optimizer):
        raise ParallelError(
            "Muon.step on parameters that zero shards takes their gradients before it begins: "
            "compute the loss and its backward before step(), without a closure, and change "
            "gradients there and not in a hook of the step."
        )
    taken: Taken = []
    try:
        with torch.no_grad():
            for group in optimizer.param_groups:
                _step_group(optimizer, group, stored)
                taken += _take(group["params"])
    except BaseException:
        # As after a step of torch that raises: gradients are all there.
        give_back(taken)
        raise
    return taken


class RefusedMuon:
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
        if type(optimizer) is not _MUON or model is None:
            return
        stored = {id(one) for name, one in model.named_parameters() if name in self._names}
        if any(id(one) in stored for group in optimizer.param_groups for one in group["params"]):
            raise ParallelError(
                "Muon.step: parameters of a model in stages that zero shards are gathered by each "
                "stage for itself, which is not done yet. Leave zero out of the plan (Muon then "
                "steps each stage's own matrices), or the pipeline, or use another optimizer."
            )

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Nothing."""


def _step_group(optimizer: Optimizer, group: dict[str, Any], stored: dict[int, bool]) -> None:
    """Step all parameters of a group: those that the optimizer could step itself as well.

    It is left with nothing that could raise: nobody would give gradients back behind that.
    """
    own = [p for p in group["params"] if p.grad is not None]
    settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    _step_on_owners(optimizer, settings, [p for p in own if stored.get(id(p))])
    for parameter in own:
        if stored.get(id(parameter)) is False:
            _step_gathered(optimizer, settings, parameter)
    rest = [p for p in own if id(p) not in stored]
    if rest:
        helper = _MUON([{**settings, "params": rest}])
        helper.state.update({p: optimizer.state[p] for p in rest if p in optimizer.state})
        helper.step()
        optimizer.state.update({p: helper.state[p] for p in rest})


def _take(parameters: Iterable[nn.Parameter]) -> Taken:
    """Take the gradients of parameters aside."""
    taken = [(p, p.grad) for p in parameters if p.grad is not None]
    for parameter, _ in taken:
        parameter.grad = None
    return taken


def give_back(taken: Taken) -> None:
    """Let the parameters have their gradients again."""
    for parameter, gradient in taken:
        parameter.grad = gradient


def _state_of(optimizer: Optimizer, parameter: Any, gradient: Any) -> Any:
    state = optimizer.state[parameter]
    if _STATE not in state:
        state[_STATE] = torch.zeros_like(gradient)
    return state[_STATE]


def _step_plain(settings: dict[str, Any], tensors: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Step values by gradients and momenta, in place."""
    made = []
    for value, gradient, _ in tensors:
        matrix = nn.Parameter(value)
        matrix.grad_dtype = gradient.dtype
        matrix.grad = gradient
        made.append(matrix)
    helper = _MUON([{**settings, "params": made}])
    for matrix, (_, _, momentum) in zip(made, tensors, strict=True):
        helper.state[matrix][_STATE] = momentum
    helper.step()


def _step_on_owners(optimizer: Optimizer, settings: dict[str, Any], own: list[Any]) -> None:
    tensors = []
    for parameter in own:
        # On every rank: where another axis only replicates, this is a collective.
        gradient: Any = gradient_total(parameter)
        momentum = _state_of(optimizer, parameter, gradient)
        leaf = local_leaf(parameter)
        if leaf.numel():
            # Views of the stored memory: what is stepped is what the next gather sends.
            local = (leaf.detach(), gradient.to_local(), momentum.to_local())
            value, slope, state = (one.view(parameter.shape) for one in local)
            tensors.append((value, slope, state))
    if own and not tensors:
        # Settings that Muon refuses are refused on ranks that own nothing, too.
        like = own[0].to_local()
        tensors = [(like.new_zeros(1, 1), like.new_zeros(1, 1), like.new_zeros(1, 1))]
    if tensors:
        _step_plain(settings, tensors)
    for parameter in own:
        # On every rank, as if each had written: a graph of before the step is refused on all.
        increment_version(local_leaf(parameter))


def _step_gathered(optimizer: Optimizer, settings: dict[str, Any], parameter: Any) -> None:
    gradient: Any = gradient_total(parameter)
    momentum = _state_of(optimizer, parameter, gradient)
    stored: Any = parameter.detach()
    value, slope, state = (one.full_tensor().clone() for one in (stored, gradient, momentum))
    _step_plain(settings, [(value, slope, state)])
    stored.copy_(_sharded_like(value, stored))
    momentum.copy_(_sharded_like(state, momentum))


def _sharded_like(full: Tensor, like: DTensor) -> Tensor:
    # No source rank: all have computed the same.
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
