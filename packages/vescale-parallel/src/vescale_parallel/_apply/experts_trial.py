"""Tries whether a module that a plan names as experts may be divided over ranks.

Tokens are sent to the rank of each expert that they chose, each with a weight of one, and what
comes back is weighed and added. That is what one device computes only if the module's result is
the weighted sum of what each expert says of a token by itself. A module that the plan names may do
something else: normalise weights, add its input, keep a number for each expert in a list. Its code
does not tell, so it is called, whole and in parts, and the results are compared.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vescale_parallel._common.twins import local_twin
from vescale_parallel._deferred.recording import DeferredTensor, real
from vescale_parallel._experts.exchange import combined
from vescale_parallel._experts.kinds import Kind

# Rounding is far smaller, and another computation differs by far more.
_TOLERANCE, _TOLERANCE_OF_HALVES = 1e-3, 5e-2
# Values that a deferred module does not have yet are made for the trial, unless it takes long.
_MOST_DEFERRED = 1 << 28


class _TrialArguments(NamedTuple):
    """The arguments of a trial; `at`: the position of the choices among those of the module."""

    hidden: Tensor
    chosen: Tensor
    weights: Tensor
    at: int

    def call(self, module: Any) -> Tensor:
        """What a module says, called as it is."""
        both = (self.chosen, self.weights) if self.at == 1 else (self.weights, self.chosen)
        found: Tensor = type(module).forward(module, self.hidden, *both)
        return found

    def rows(self, which: Any) -> _TrialArguments:
        """The same of some tokens only."""
        return _TrialArguments(self.hidden[which], self.chosen[which], self.weights[which], self.at)


def why_not_apart(module: nn.Module, kind: Kind, counts: Sequence[int]) -> str | None:
    """Why a module cannot be shared by ranks, in words; None if it can, or if no trial is possible.

    Nothing of the module changes, nor do random generators. Not collective: the same on all ranks
    that have the same module.

    Args:
        module: with the parameters of one device.
        kind: how it computes, as far as that is known.
        counts: how many experts each rank is to hold.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if sum(one.numel() for one in parameters.values() if _is_deferred(one)) > _MOST_DEFERRED:
        return None
    device = next(iter(parameters.values())).device
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type), torch.no_grad():
        own = {name: real(one.detach()) for name, one in parameters.items()}
        # A copy of parameters would take as much memory again.
        memo: dict[int, Any] = {id(one): one for one in parameters.values()}
        memo |= {id(one): real(one) for one in module.buffers() if _is_deferred(one)}
        try:
            # What it keeps in Python and in buffers is written to a copy.
            inside = copy.deepcopy(module, memo).train()
        except Exception:  # whatever cannot be copied: there is no trial
            return None
        return _tried(inside, kind, counts, own, device)


def _tried(
    inside: nn.Module, kind: Kind, counts: Sequence[int], own: Mapping[str, Tensor], device: Any
) -> str | None:
    buffers = {name: one.clone() for name, one in inside.named_buffers()}
    for given in _possible(kind, own):
        # Both, as a module on a device may draw on the host as well.
        state = torch.get_rng_state(), _device_state(device)
        try:
            wanted = given.call(local_twin(inside, own))
        except Exception:  # not how it is called: another width, weights before choices
            continue
        if not isinstance(wanted, Tensor) or wanted.shape != given.hidden.shape:
            continue
        # NaN agrees with nothing, and zeros agree with too much.
        if not (wanted.isfinite().all() and wanted.any()):
            continue
        now = torch.get_rng_state(), _device_state(device)
        if not all(map(torch.equal, state, now)):
            return "it draws random numbers, which would be others for rows that have moved"
        for name, one in inside.named_buffers():
            if not torch.equal(one, buffers[name]):
                return f"it writes to its buffer '{name}', and each rank would write of its rows"
        return _compared(inside, kind, counts, own, given, wanted)
    return None


def _compared(
    inside: nn.Module,
    kind: Kind,
    counts: Sequence[int],
    own: Mapping[str, Tensor],
    given: _TrialArguments,
    wanted: Tensor,
) -> str | None:
    """Why parts do not give what the whole gave, in words."""
    # In two halves: what depends on how many tokens there are, or on which of them come together,
    # shows as well.
    half = len(wanted) // 2
    try:
        parts = [
            _in_parts(inside, kind, counts, own, given.rows(some))
            for some in (slice(None, half), slice(half, None))
        ]
    except Exception as error:  # whatever its code raises
        return f"with a part of its experts it raises {type(error).__name__}: {str(error)[:120]}"
    found = torch.cat(parts)
    # Sums in another order round otherwise, and in 16 bits by far more.
    halves = wanted.dtype in (torch.float16, torch.bfloat16)
    most = (_TOLERANCE_OF_HALVES if halves else _TOLERANCE) * wanted.abs().max()
    if found.shape == wanted.shape and bool(((found - wanted).abs() <= most).all()):
        return None
    return (
        "its result is not the weighted sum of what each expert says of a token by itself, as a "
        f"trial of {len(wanted)} tokens shows. Numbers of each expert belong into parameters whose "
        "first of two dims or more counts the experts, not into lists, buffers or parameters of "
        "one dim; weights are applied to results; and what else it does belongs outside"
    )


def _in_parts(
    inside: nn.Module,
    kind: Kind,
    counts: Sequence[int],
    own: Mapping[str, Tensor],
    given: _TrialArguments,
) -> Tensor:
    """What ranks would say together."""
    said = torch.zeros_like(given.hidden).unsqueeze(1).repeat(1, given.chosen.shape[1], 1)
    for start, count in zip(itertools.accumulate(counts, initial=0), counts, strict=False):
        here = (given.chosen >= start) & (given.chosen < start + count)
        if not here.any():
            continue  # it has no rows, or no experts
        part = {
            name: one[start : start + count] if name in kind.stacks else one
            for name, one in own.items()
        }
        rows = given.hidden.unsqueeze(1).expand_as(said)[here]
        ids = (given.chosen[here] - start).view(-1, 1)
        ones = torch.ones_like(rows[:, :1])
        twin = local_twin(inside, part, count)
        said[here] = _TrialArguments(rows, ids, ones, given.at).call(twin).to(said.dtype)
    return combined(said, given.chosen, given.weights, kind.experts, kind.ordered)


def _possible(kind: Kind, own: Mapping[str, Tensor]) -> Iterator[_TrialArguments]:
    """Arguments that such a module may take: the width is one of the dims of its stacks."""
    stack = own[kind.stacks[0]]
    widths = dict.fromkeys(size for name in kind.stacks for size in own[name].shape[1:])
    experts = kind.experts
    made = torch.Generator().manual_seed(0)
    first = torch.arange(2 * experts, device="cpu") % experts
    # Two different ones for each token, in either order, and each expert is chosen.
    second = (first + 1 + torch.arange(2 * experts, device="cpu") // experts) % experts
    index = torch.stack([first, second], 1)[:, : min(2, experts)].to(stack.device)
    for width in widths:
        hidden = torch.randn(len(index), width, generator=made, device="cpu").to(stack)
        weights = torch.rand(index.shape, generator=made, device="cpu").to(stack)
        for at in (1, 2):
            yield _TrialArguments(hidden, index, weights, at)


def _is_deferred(tensor: Tensor) -> bool:
    return isinstance(tensor, DeferredTensor)


def _device_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device.type).get_rng_state(device)
    return state
