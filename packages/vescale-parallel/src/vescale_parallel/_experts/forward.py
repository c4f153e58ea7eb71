"""The forward of a module of experts over a mesh, in place of its own.

Its own is still what computes: on plain local tensors, for the rows that arrived and the experts
that this rank holds, as if these were all. So the products are those that whoever wrote the module
wants (a loop, grouped products), and only the choice of rows and their sum are done here.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_dtensor import DTensor, Partial, Placement, Replicate, Shard, local_map

from vescale_parallel._common.twins import local_twin, take_over_attributes
from vescale_parallel._errors import ParallelError
from vescale_parallel._experts.empty_experts import empty_result
from vescale_parallel._experts.exchange import Shares, exchange_tokens
from vescale_parallel._experts.kinds import Kind
from vescale_parallel._experts.moe import Experts

Placements = tuple[Any, ...]


class ExpertsForward:
    """Calls a module of experts with distributed tensors.

    Args:
        module: whose forward this replaces.
        kind: how it computes.
        mesh: of the activations.
        shares: which experts are where; None: every rank holds all, and computes its own rows.
        over: positions of the axes of the mesh that share the experts.
        within: positions of the axes over which the products of each expert are sharded.
        placements: of its parameters, by name in the module, where they are used; all others are
            replicated there.
    """

    def __init__(
        self,
        module: nn.Module,
        kind: Kind,
        mesh: DeviceMesh,
        shares: Shares | None,
        over: Sequence[int],
        within: Sequence[int],
        placements: Mapping[str, Placements],
    ) -> None:
        self.module, self.kind, self.mesh, self.shares = module, kind, mesh, shares
        self.over, self.within, self.placements = tuple(over), tuple(within), dict(placements)
        # Of the class: the module's own `forward` is this object.
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the experts say about the tokens, summed by token. Collective."""
        given = self._arguments(args, kwargs)
        names, parameters = self._parameters()
        # A plain call, as from a rank's own evaluation: the module as it was. And experts that the
        # plan does not share, called in another form, or adapted since: right with whole tensors.
        plain = not any(isinstance(one, DTensor) for one in (*(given or ()), *parameters))
        if given is None or plain or not self._has_stacks(names):
            alone: Tensor = type(self.module).forward(self.module, *args, **kwargs)
            return alone
        given = [self._distributed(one) for one in given]
        came: tuple[Placement, ...] = given[0].placements  # type: ignore[attr-defined]
        # Tokens of other axes' shards stay where they are: only axes that share the experts take
        # part in the exchange.
        rows = self._rows(came)
        wanted = [self.placements.get(name, (Replicate(),) * self.mesh.ndim) for name in names]
        # Each rank has computed with a part of the hidden dim of its experts: their sum is the
        # result.
        results = [Partial() if i in self.within else one for i, one in enumerate(rows)]

        def local(*tensors: Tensor) -> Tensor:
            return self._local(tensors[:3], dict(zip(names, tensors[3:], strict=True)))

        mapped = local_map(
            local,
            (tuple(results),),
            in_placements=(rows, rows, rows, *wanted),
            device_mesh=self.mesh,
            redistribute_inputs=True,
            # Known beforehand, so that nothing is exchanged to find it out.
            out_shapes=[tuple(given[0].shape)],
        )
        found: DTensor = mapped(*given, *parameters)
        return self._as_before(found, came)

    def _arguments(self, args: Any, kwargs: Any) -> list[Tensor] | None:
        """Return hidden states, choices and weights, in the order in which the module has them.

        None for a call of another form, where experts are not shared.
        """
        named = dict(zip(self._names, args, strict=False)) | kwargs
        given = [named[name] for name in self._names if isinstance(named.get(name), Tensor)]
        whole = [one for one in given[1:] if not one.dtype.is_floating_point]
        fits = len(given) == len(named) == 3 and len(whole) == 1
        if not fits or any(one.ndim != 2 for one in given):
            if self.shares is None:
                return None
            shown = [f"{tuple(one.shape)} {one.dtype}" for one in given]
            raise ParallelError(
                f"{type(self.module).__name__} was called with {shown}: experts that a plan shards "
                "take hidden states (tokens, width), the experts that tokens chose (tokens, k) and "
                "their weights (tokens, k), and nothing else."
            )
        self._require_fitting(*given)
        return given

    def _require_fitting(self, hidden: Tensor, *choices: Tensor) -> None:
        """Refuse what would fail only on ranks that get rows, when others wait for them.

        Raises:
            ParallelError: alike on every rank, before anything is sent.
        """
        name, tokens = type(self.module).__name__, hidden.shape[0]
        counts = [tuple(one.shape) for one in choices]
        if any(rows != tokens or k < 1 for rows, k in counts):
            raise ParallelError(
                f"{name} was called with {tokens} tokens, and choices and weights of shapes "
                f"{counts[0]} and {counts[1]}: each token has at least one of both."
            )
        if self.shares is not None and counts[0] != counts[1]:
            raise ParallelError(
                f"{name} was called with choices and weights of shapes {counts[0]} and "
                f"{counts[1]}: experts that a plan shards take one weight for each choice."
            )
        if not self.kind.up:
            return  # how its products lie is not known here
        stack, outputs = self.kind.up[0]
        weight = getattr(self.module, stack)
        if weight.shape[3 - outputs] != hidden.shape[1]:
            raise ParallelError(
                f"{name} was called with tokens of width {hidden.shape[1]}, and its experts take "
                f"{weight.shape[3 - outputs]} ({stack}: {tuple(weight.shape)})."
            )
        casts = not isinstance(self.module, Experts) or torch.is_autocast_enabled(
            hidden.device.type
        )
        if not casts and weight.dtype != hidden.dtype:
            raise ParallelError(
                f"{name} was called with tokens of {hidden.dtype}, and its experts are of "
                f"{weight.dtype}: convert one, or call it in torch.autocast."
            )

    def _has_stacks(self, names: Sequence[str]) -> bool:
        """Whether stacks are parameters still: adapters may replace them for a call.

        Raises:
            ParallelError: alike on every rank, before anything is sent: they are not, and the plan
                shards them.
        """
        gone = sorted({*self.placements} - {*names})
        if gone and (self.shares is not None or self.within):
            raise ParallelError(
                f"{type(self.module).__name__} had stacks {gone}, which the plan shards, and they "
                "are no parameters of it in this call. Adapt the model before parallelize."
            )
        return not gone

    def _parameters(self) -> tuple[list[str], list[Tensor]]:
        # At each call: units of `zero` let the module hold gathered ones while it runs.
        found = dict(self.module.named_parameters(remove_duplicate=False))
        return list(found), [self._distributed(one) for one in found.values()]

    def _distributed(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            found: Tensor = tensor
            return found
        # Plain tensors count as replicated, as everywhere.
        everywhere = [Replicate()] * self.mesh.ndim
        found = DTensor.from_local(tensor, self.mesh, everywhere, run_check="sampled")
        return found

    def _rows(self, came: Sequence[Placement]) -> Placements:
        """Where tokens are while experts compute: whole rows, over the experts' axes each once."""
        return tuple(self._row_placement(axis, one) for axis, one in enumerate(came))

    def _row_placement(self, axis: int, came: Any) -> Any:
        if axis in self.within:
            return Replicate()  # each rank has a part of every expert, so it needs every token
        if came.is_sharded() and came.cut_dims() == (0,):
            return came
        return Shard(0) if axis in self.over else Replicate()

    def _as_before(self, found: DTensor, came: Sequence[Placement]) -> DTensor:
        """Gather rows over axes where all ranks came with all rows: what follows has them so."""
        wanted = [
            Replicate() if axis in self.over and came[axis].is_replicate() else one
            for axis, one in enumerate(found.placements)
        ]
        back: DTensor = found.redistribute(self.mesh, wanted)
        return back

    def _local(self, given: Sequence[Tensor], own: dict[str, Tensor]) -> Tensor:
        """Return what the experts say about this rank's rows, from local tensors. Collective."""
        # Choices are integers, weights are not: modules name and order them as they like.
        at = 1 if not given[1].dtype.is_floating_point else 2
        hidden, index, weights = given[0], given[at], given[3 - at]
        shares = self.shares

        def run(inside: nn.Module, rows: Tensor, chosen: Tensor, by: Tensor) -> Tensor:
            both = (chosen, by) if at == 1 else (by, chosen)
            found: Tensor = type(inside).forward(inside, rows, *both)
            return found

        def compute(rows: Tensor, ids: Tensor) -> Tensor:
            # Decided by this rank alone; nothing is sent in either case.
            if not len(rows):
                return empty_result(rows, list(own.values()))
            assert shares is not None
            # As many experts as there are here: loops of modules run up to that number.
            inside = local_twin(self.module, own, shares.own)
            # Each row as a token with one choice of weight one: its own weight is applied where all
            # of its results meet.
            return run(inside, rows, ids.view(-1, 1), torch.ones_like(rows[:, :1]))

        if shares is not None:
            return exchange_tokens(compute, hidden, index, weights, shares, self.kind.ordered)
        inside = local_twin(self.module, own)
        if not len(hidden):
            # A row of zeros tells the dtype, which other ranks' rows may be promoted to.
            with torch.no_grad():
                rows = [one.new_zeros(1, one.shape[1]) for one in (hidden, index, weights)]
                row = run(inside, *rows)
            take_over_attributes(self.module, inside, type(self.module).__name__)
            return empty_result(hidden, [weights, *own.values()]).to(row.dtype)
        found = run(inside, hidden, index, weights)
        take_over_attributes(self.module, inside, type(self.module).__name__)
        needed = [one for one in (hidden, weights, *own.values()) if one.requires_grad]
        if needed and torch.is_grad_enabled() and not found.requires_grad:
            # All choices of these rows were dropped: they take part in backward all the same.
            found = found + empty_result(found, needed)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertsForward:
        # Of the copied module, on the same mesh: groups cannot be copied.
        copied = copy.copy(self)
        memo[id(self)] = copied
        copied.module = copy.deepcopy(self.module, memo)
        return copied
