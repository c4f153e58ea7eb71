"""One training step over logical shards: what `forward_backward` calls of an invariant model."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import Group, group_of
from vescale_comm.generators import States, generators_of
from vescale_dtensor import DTensor
from vescale_dtensor.storage import local_leaf

from vescale_parallel._common.agreement import checksum, require_same
from vescale_parallel._common.forward_counters import Counts, places_of
from vescale_parallel._common.mesh import mesh_ranks
from vescale_parallel._common.messages import listed
from vescale_parallel._common.torch_compat import hooks_of
from vescale_parallel._errors import ParallelError
from vescale_parallel._invariant.delivery import Destination, destinations_of
from vescale_parallel._invariant.exchange import exchange_sums
from vescale_parallel._invariant.facts import Told, tell
from vescale_parallel._invariant.metrics import PackedResult, form_of, values_within, with_values
from vescale_parallel._invariant.norms import RunningStatistics
from vescale_parallel._invariant.resolve import InvariantRow, synchronized_norms
from vescale_parallel._invariant.shard_gradients import ShardGradients
from vescale_parallel._invariant.shard_rows import rows_of_all
from vescale_parallel._invariant.tree import TreeSum, nodes_within, present, rows_of, shares, total
from vescale_parallel._step.parts import Part, loss_of
from vescale_parallel._zero.schedule import Schedule

_CHECKED_BATCHES: Final = 2
"""How many batches are compared between ranks: a loader that is wrong is wrong from the start."""

_LOOKED_AT: Final = 16
"""Of later batches, each of so many is compared: a loader or an augmentation may drift."""


@dataclass(frozen=True)
class _Ran:
    """What came of a rank's shards.

    Attributes:
        losses: by shard.
        dtype: of the losses.
        error: what was raised instead.
    """

    losses: dict[int, float]
    dtype: torch.dtype
    error: Exception | None = None


class InvariantStep:
    """Computes this rank's logical shards one after another, and the sums over all of them.

    Args:
        model: the parallelised model, on a mesh without the axes of the batch.
        row: shards, and the axes of the batch.
        mesh: all ranks.
        schedule: of the model's units, where it has some.
        over: the axis that stored parameters are sharded over.
    """

    def __init__(
        self,
        model: nn.Module,
        row: InvariantRow,
        mesh: DeviceMesh,
        schedule: Schedule | None,
        over: str,
    ) -> None:
        self.model, self.row, self.mesh, self.schedule = model, row, mesh, schedule
        self.group: Group | None = group_of(mesh, row.axes) if row.axes else None
        self.rank = self.group.rank if self.group else 0
        # Contiguous: neighbouring shards meet in low nodes of the tree, which one rank can add by
        # itself.
        self.spans = shares(row.shards, row.ranks)
        self.running = False
        self._counts: Counts | None = None
        self._batches, self._is_copy = 0, False
        # It asks this object whether a step runs, when gradients arrive.
        self.collected = ShardGradients(model, schedule, self)
        self._over, self._trained = over, [False]
        self.destinations: list[Destination] = []
        # Before all other hooks: those of ZeRO would gather, and a rank that refuses afterwards
        # would leave the others in the gather.
        model.register_forward_pre_hook(self._refuse_others, prepend=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> InvariantStep:
        """That of a copied model, which can be evaluated, but not trained: units know the first."""
        made = copy.copy(self)
        # Units of the copy hand their gradients to `collected` of the first model: trained, the
        # copy would add to the wrong sums, silently.
        made._is_copy = True
        memo[id(self)] = made
        return made

    def forward_backward(self, part: Part) -> Tensor:
        """Return the loss of the whole batch; gradients are left complete. Collective."""
        self._require_ready()
        # Before rows are counted: a batch that cannot be cut on one rank is told to all.
        self._require_same(part)
        rows = part.rows(self._dim_of)
        self._find_destinations()
        sizes = rows_of(rows, self.row.shards)
        # Drawn alike on every rank, before anything depends on which shards it computes.
        seeds = torch.randint(2**62, (self.row.shards,), device="cpu").tolist()
        with self.collected.all_shards(), self._run_alone():
            ran = self._run(part.cut(self._dim_of, sizes), sizes, seeds)
            # One exchange for all that has to be alike: losses, which parameters had gradients, and
            # the numbers that decide about shards. Behind it no rank can be alone.
            told = self._tell(ran, [*seeds, *sizes, *self._looked_at(part), *self._norms.form()])
            summed = self._summed(told, sizes)
        # Outside of `all_shards`, which puts gradients of earlier backwards back first: delivered
        # ones are added to them, as `.backward()` does.
        self._deliver(told, summed)
        shards = [[one for one in range(*own) if sizes[one]] for own in self.spans]
        self._norms.update(shards, self.group, self.row.shards, self.mesh.device_type)
        leaves = {
            (shard, shard + 1): told.losses[shard] * size / rows
            for shard, size in enumerate(sizes)
            if size
        }
        # By the same tree as gradients: a plain sum would have another last bit for other numbers
        # of ranks.
        loss = total(self.row.shards, leaves, operator.add)
        return torch.tensor(loss, dtype=ran.dtype, device=self.mesh.device_type)

    def _run(self, parts: Sequence[Part], sizes: Sequence[int], seeds: Sequence[int]) -> _Ran:
        """Run this rank's shards."""
        self._norms = RunningStatistics(self.model)
        try:
            with self._norms.noted():
                return self._run_shards(parts, sizes, seeds)
        except Exception as error:
            # Ranks that gather parameters together wait within the model, and not behind it.
            if self.schedule is not None or self.mesh.ndim > len(self.row.axes):
                raise
            self._sums = [TreeSum[Tensor](self.row.shards, Tensor.add_) for _ in self.destinations]
            return _Ran({}, torch.float32, error)

    def _run_shards(
        self, parts: Sequence[Part], sizes: Sequence[int], seeds: Sequence[int]
    ) -> _Ran:
        # Only this rank's: what others compute comes as finished nodes of the tree.
        low, high = self.spans[self.rank]
        own = [shard for shard in range(low, high) if sizes[shard]]
        self._sums = [TreeSum[Tensor](self.row.shards, Tensor.add_) for _ in self.destinations]
        losses: dict[int, Tensor] = {}
        for turn in range(self._turns(sizes)):
            # Ranks that gather parameters together take as many turns: the last ones idly, with
            # the first shard, of which nothing is kept.
            shard = own[turn] if turn < len(own) else 0
            self._seed(seeds[shard])
            # Weighed before backward and not after the sum: the rows of the last shards may be
            # fewer.
            loss = self._run_one(parts[shard], sizes[shard] / sum(sizes))
            # Every turn, idle ones too: where `tp` owes sums this is a collective.
            found = self.collected.take()
            self._norms.put(shard if turn < len(own) else None)
            if turn < len(own):
                losses[shard] = loss
                for sums, one in zip(self._sums, self.destinations, strict=True):
                    sums.put(shard, one.bundle.pack(found))
        for shard in range(low, high):
            if not sizes[shard]:
                for sums in self._sums:
                    # A shard without rows takes its place in the tree even so: the tree has one
                    # form for all batches.
                    sums.put(shard, None)
        return _Ran({shard: float(loss) for shard, loss in losses.items()}, loss.dtype)

    def _turns(self, sizes: Sequence[int]) -> int:
        # By all ranks' spans, which each knows: nobody asks how often the others run.
        every = [sum(1 for one in sizes[low:high] if one) for low, high in self.spans]
        # At least one: a rank without rows learns the dtype of the loss from it.
        return max(1, max(every) if self.schedule is not None else every[self.rank])

    def _run_one(self, part: Part, weight: float) -> Tensor:
        loss = loss_of(part, self.model(*part.args, **part.kwargs))
        if torch.is_grad_enabled():
            # The product is part of each rank's shard, so that what is summed has been rounded
            # alike wherever the shard is computed.
            (loss * weight).backward()  # type: ignore[no-untyped-call]
        value = loss.detach()
        whole: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
        return whole

    def sums(self, function: Callable[..., Any], part: Part) -> Any:
        """Return what a function gives for each shard, added up over all of them. Collective.

        Args:
            function: called with the rows of a shard; of its own it draws no random numbers that
                anything else would see.
            part: its arguments, of the whole batch.
        """
        rows = part.rows(self._dim_of)
        sizes = rows_of(rows, self.row.shards)
        shards = [[one for one in range(*own) if sizes[one]] for own in self.spans]
        parts = part.cut(self._dim_of, sizes)
        # What norms in training mode find is not kept: a metric is no step.
        with self._run_alone(), RunningStatistics(self.model).noted():
            seeds = torch.randint(2**62, (self.row.shards,), device="cpu").tolist()
            mine = shards[self.rank]
            # Packed into two vectors, of integers and of floats: counts beyond 2**24 would not
            # survive in float32.
            found: dict[int, PackedResult] = {}
            # As many turns on every rank: the function may gather parameters.
            for turn in range(max(len(each) for each in shards)):
                shard = mine[turn] if turn < len(mine) else 0
                self._seed(seeds[shard])
                like = function(*parts[shard].args, **parts[shard].kwargs)
                values = values_within(like)
                if turn < len(mine):
                    found[shard] = PackedResult.of(values, self.mesh.device_type)
        return with_values(like, iter(self._added(found, values, shards, [*sizes, *seeds])))

    def _added(
        self,
        found: dict[int, PackedResult],
        values: Sequence[Any],
        shards: Sequence[Sequence[int]],
        alike: Sequence[int],
    ) -> list[Any]:
        """Return the sums over all shards, in the form of `values`."""
        digest = [*alike, form_of(values)]
        # Before anything is exchanged: ranks whose functions return other forms would exchange
        # vectors of other lengths.
        tell({}, [], digest, "", self.spans, self.group, self.mesh.device_type)
        empty = PackedResult.of(values, self.mesh.device_type)
        told = [
            rows_of_all(
                {shard: getattr(one, kind) for shard, one in found.items()},
                getattr(empty, kind).new_empty(0, getattr(empty, kind).numel()),
                shards,
                self.group,
            )
            for kind in ("integers", "floats")
        ]
        every = {(s, s + 1): PackedResult(told[0][s], told[1][s]) for s in told[0]}
        summed = total(self.row.shards, every, PackedResult.__add__)
        assert summed is not None
        return summed.unpacked(values)

    def _tell(self, ran: _Ran, alike: Sequence[object]) -> Told:
        problem = self.collected.problem() or self._norms.problem()
        # A rank that raised says only that: its error is raised there, with its own traceback.
        problem = problem if ran.error is None else "it raised"
        arrived, device = self.collected.arrived, self.mesh.device_type
        try:
            # Raises on every rank where one has a problem, so `ran.error` does not get lost behind
            # another's words.
            return tell(ran.losses, arrived, alike, problem, self.spans, self.group, device)
        except ParallelError:
            if ran.error is not None:
                raise ran.error from None
            raise

    def _summed(self, told: Told, sizes: Sequence[int]) -> list[Tensor | None]:
        """Return for each destination the sum over all shards; None where nothing arrived."""
        whole = (0, self.row.shards)
        nodes = [present(nodes_within(whole, own), sizes) for own in self.spans]
        found: list[Tensor | None] = []
        for sums, one in zip(self._sums, self.destinations, strict=True):
            mine = sums.take()
            # The same on every rank, as `told` is: nobody waits in an exchange that others skip.
            if any(told.arrived[number] for number in one.bundle.parameters):
                summed = exchange_sums(one.bundle, mine, nodes, self.row.shards, self.group)
                found.append(summed)
            else:
                found.append(None)
        return found

    def _deliver(self, told: Told, summed: Sequence[Tensor | None]) -> None:
        with torch.no_grad():
            for one, flat in zip(self.destinations, summed, strict=True):
                if flat is not None:
                    one.deliver(self.collected.parameters, told.arrived, flat)

    @contextmanager
    def _run_alone(self) -> Iterator[None]:
        """Seeds of the shards leave no trace in the generators."""
        device = self.mesh.device_type
        devices = [] if device == "cpu" else [torch.accelerator.current_device_index()]
        # `fork_rng` needs the name of an accelerator, also where no device of it is forked.
        kind = "cuda" if device == "cpu" else device
        self._others = States(generators_of(self.model))
        self._counts = None
        with torch.random.fork_rng(devices, device_type=kind):
            self.running = True
            try:
                yield
            finally:
                self.running = False
                self._others.restore()

    def _seed(self, seed: int) -> None:
        """Let a shard draw its own numbers, from whatever generator."""
        # Those that `_run_alone` restores: `torch.manual_seed` seeds every device of the process.
        torch.default_generator.manual_seed(seed)
        if self.mesh.device_type != "cpu":
            torch.get_device_module(self.mesh.device_type).manual_seed(seed)
        # Of the same seed: Python's and numpy's stand elsewhere on each rank where nobody has
        # seeded them.
        self._others.seed(seed)
        # And count from where the step began: a call of the model is one, in however many shards.
        if self._counts is None:
            self._counts = Counts(places_of(self.model))
        else:
            self._counts.restore()

    def _find_destinations(self) -> None:
        """Know where sums go, also when parameters were frozen since."""
        trained = [one.requires_grad for one in self.collected.parameters]
        # Bundles are made for those that are trained: a parameter that was frozen since has no
        # gradient on any rank, and would be sent as zeros.
        if trained != self._trained:
            self._trained = trained
            self.destinations = destinations_of(self.collected, self.row, self.schedule, self._over)

    def _dim_of(self, tensor: Tensor) -> int | None:
        batch = self.row.batch
        if tensor.ndim < max(batch.least_ndim, 1):
            return None
        return batch.dim_of(batch.axes[0], tensor.ndim)

    def _require_ready(self) -> None:
        """Refuse, alike on all ranks, what would not be invariant."""
        if self._is_copy:
            raise ParallelError(
                "this model is a copy of a parallelised one whose steps are invariant: it can be "
                "evaluated. To train it, copy the plain model and parallelize the copy."
            )
        norms = synchronized_norms(self.model)
        if norms:
            raise ParallelError(
                f"synchronised batch norms in training mode: {listed(norms)}. They ask for sums "
                "over the batch within forward, which logical shards that run one after another "
                "do not have. Use nn.BatchNorm, which takes each shard by itself."
            )
        self.collected.require_same_parameters()
        # Of the local leaves: that is where autograd accumulates, whatever tensor the user hooked.
        named = self.model.named_parameters()
        hooked = [name for name, one in named if hooks_of(local_leaf(one))]
        if hooked:
            raise ParallelError(
                f"parameters have hooks: {listed(hooked)}. They would be called with gradients of "
                "single logical shards, and not with the sum. Look at .grad after forward_backward."
            )

    def _require_same(self, part: Part) -> None:
        """Compare the first batches between ranks: each passes the whole one."""
        self._batches += 1
        if self._batches > _CHECKED_BATCHES:
            return
        found = part.tensors()
        facts = {
            "tensor": {name: f"{tuple(one.shape)} {one.dtype}" for name, one in found.items()},
            "value of": {name: f"checksum {checksum(one):08x}" for name, one in found.items()},
        }
        advice = "Pass the whole batch on every rank; each computes its logical shards of it."
        require_same(
            facts,
            peers=mesh_ranks(self.mesh),
            head="the batches that are passed to forward_backward differ between ranks:",
            advice=dict.fromkeys(facts, advice),
            mesh=self.mesh,
        )

    def _looked_at(self, part: Part) -> list[int]:
        """Return checksums of the batch now and then: they travel with what is sent anyway."""
        # Counted by calls, which all ranks make alike: a branch by time or by content would part
        # them.
        if self._batches % _LOOKED_AT:
            return []
        return [checksum(one) for one in part.tensors().values()]

    def _refuse_others(self, module: nn.Module, args: Any) -> None:
        """The root's forward pre-hook."""
        if torch.is_grad_enabled() and module.training and not self.running:
            raise ParallelError(
                "this model is trained by forward_backward(model, ...): with deterministic="
                "'dp-invariant' each logical shard of the batch is computed by itself. Evaluate "
                "it under torch.no_grad(), where every rank computes the whole batch."
            )
