"""Batches of which every rank passes its own rows: checked, counted, and made one global batch."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import all_gather, group_of
from vescale_comm.agreement import digest, message_device, named, several_ranks
from vescale_comm.nested import Copied, map_tensors, named_tensors_within
from vescale_dtensor import DTensor, RaggedShard, Replicate, untraced

from vescale_parallel._apply.placements import placements
from vescale_parallel._apply.write_back import WrittenBack
from vescale_parallel._common.agreement import checksum, require_same
from vescale_parallel._common.mesh import mesh_ranks, mesh_sizes
from vescale_parallel._common.pickle_refusal import NotPickled
from vescale_parallel._common.rows import row_counts, shard_of, sharing_axes
from vescale_parallel._common.torch_compat import no_torch_function
from vescale_parallel._errors import DisagreementError, PlanError
from vescale_parallel._notation.layout import RuleLayout

_CHECKED_BATCHES: Final = 2
"""In how many batches values are compared between the ranks that pass the same rows."""

_TENSORS: Final = 30
"""Of how many tensors of a batch the rows travel in the first message."""

_FORM: Final = (
    "With batch_is='local' every rank passes its own rows in the same form: the same tensors, "
    "dtypes and other extents. A rank without rows passes tensors of no rows."
)
_OWN_ROWS: Final = (
    "With batch_is='local' every rank passes its own rows: pass those of both, cut or drawn alike "
    "(torch.randn_like(distribute_batch(model, rows)) are a batch's random numbers). What is no "
    "batch, and the same on every rank, is passed as a replicated DTensor."
)
_REPLICAS: Final = (
    "Ranks that differ only along axes that do not share the batch (tp) pass the same rows."
)


class LocalBatch(NotPickled):
    """The root's forward pre-hook: plain tensors are this rank's rows of the global batch.

    The global batch is that of all ranks' rows in the order of the ranks. Forms and numbers of rows
    are exchanged for every batch, in one collective of a few bytes, so a rank with other rows than
    before, or with none, changes no program. Rows that do not lie as `torch.chunk` would have them
    are moved, so that later layers meet even shards.
    """

    def __init__(self, layout: RuleLayout, mesh: DeviceMesh) -> None:
        self.layout, self.mesh = layout, mesh
        # Apart: a loop that distributes labels by itself has the model's own batches compared, too.
        self._unchecked = {"the model": _CHECKED_BATCHES, "outside": _CHECKED_BATCHES}
        self._back = WrittenBack()
        sizes = mesh_sizes(mesh)
        self._axes = sharing_axes(mesh, layout.axes)
        self._sizes = [sizes[axis] for axis in self._axes]
        # By position in the mesh, row-major: the shard of the batch that the rank there passes.
        kept = [list(sizes).index(axis) for axis in self._axes]
        self._shards = [
            shard_of([at[dim] for dim in kept], self._sizes)
            for at in product(*(range(size) for size in sizes.values()))
        ]

    @untraced
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Distribute arguments and keyword arguments."""
        copied: Copied = []
        placed = self.distributed(args, kwargs, copied, "the model")
        self._back.watch(module, copied)
        return placed

    def distributed(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        copied: Copied,
        of: str = "outside",
        *,
        beside: Mapping[str, Tensor] | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See `Distribution` in `_step/distribute_batch.py`; `of`: whose first batches count."""
        # Beside the arguments of a model they are those of a loss, and are called so.
        named = named_tensors_within(args, "loss" if beside else "args")
        plain = _plain(named | named_tensors_within(kwargs, "kwargs"))
        every = plain | _plain(beside or {})
        rows = self._counts(every)
        self._require_own_rows(every, rows)
        # Those of `plain` are the first ones.
        counts = iter(rows)
        if self._unchecked[of] > 0:
            self._unchecked[of] -= 1
            with no_torch_function():
                self._require_same_values(plain)

        def place(tensor: Tensor) -> Tensor:
            if isinstance(tensor, DTensor) or not self._has_rows(tensor):
                return tensor
            return self._placed(tensor, next(counts))

        placed = map_tensors(place, args, copied=copied)
        return placed, {key: map_tensors(place, one, copied=copied) for key, one in kwargs.items()}

    def _has_rows(self, tensor: Tensor) -> bool:
        # One without the batch dim (a scale, a table) is the same everywhere, and stays plain.
        return tensor.ndim >= max(self.layout.least_ndim, 1)

    def _dim(self, tensor: Tensor) -> int:
        found = [self.layout.dim_of(axis, tensor.ndim) for axis in self.layout.axes]
        return next((dim for dim in found if dim is not None), 0)

    def _counts(self, plain: dict[str, Tensor]) -> list[list[int]]:
        """For each tensor with rows, those of each shard of the batch. Collective."""
        rows = [t.shape[self._dim(t)] for t in plain.values() if self._has_rows(t)]
        forms = {name: self._form(tensor) for name, tensor in plain.items()}
        # Of one length whatever a batch has: messages of ranks with other numbers of tensors would
        # not fit each other, and no rank could say why.
        first = [_digest(forms), *_padded(rows[:_TENSORS], _TENSORS)]
        table = self._told(first)
        # All ranks have the same table, so all of them come to the next collective, or none does.
        if len({row[0] for row in table}) > 1:
            with no_torch_function():
                self._require_same_forms(forms)
        found = [row[1 : 1 + len(rows)] for row in table]
        for start in range(_TENSORS, len(rows), _TENSORS):
            # As often on every rank: forms are the same by now, and so is the number of tensors.
            rest = self._told(_padded(rows[start : start + _TENSORS], _TENSORS))
            found = [a + b[: len(rows) - start] for a, b in zip(found, rest, strict=True)]
        return [self._by_shard([row[at] for row in found]) for at in range(len(rows))]

    def _form(self, tensor: Tensor) -> str:
        shape = [str(extent) for extent in tensor.shape]
        if self._has_rows(tensor):
            shape[self._dim(tensor)] = "rows"
        return f"({', '.join(shape)}) {tensor.dtype}"

    def _told(self, mine: list[int]) -> list[list[int]]:
        """What each rank of the mesh tells, in the order of the mesh."""
        if not several_ranks():
            return [mine] * len(self._shards)
        group = group_of(self.mesh, tuple(mesh_sizes(self.mesh)))
        # No check beside the program, which `gather_numbers` is for: every call needs these
        # numbers, so a trace has to show what they cost.
        sent = torch.tensor([mine], device=message_device(group))
        found: list[list[int]] = all_gather(sent, group).tolist()
        return found

    def _require_same_forms(self, forms: dict[str, str]) -> None:
        require_same(
            {"tensor": forms},
            peers=mesh_ranks(self.mesh),
            head="the rows that ranks pass to the model differ in their form:",
            advice={"tensor": _FORM},
            mesh=self.mesh,
        )

    def _by_shard(self, rows: list[int]) -> list[int]:
        """Rows of each shard, from those of each rank."""
        found: dict[int, dict[int, list[int]]] = {}
        for rank, shard, number in zip(mesh_ranks(self.mesh), self._shards, rows, strict=True):
            found.setdefault(shard, {}).setdefault(number, []).append(rank)
        for holders in found.values():
            if len(holders) > 1:
                told = "; ".join(f"{n} rows on {named(sorted(r))}" for n, r in holders.items())
                raise DisagreementError(
                    f"ranks that pass the same shard of the batch differ: {told}.\n{_REPLICAS}"
                )
        return [next(iter(found[shard])) for shard in range(math.prod(self._sizes))]

    def _require_own_rows(self, plain: dict[str, Tensor], rows: list[list[int]]) -> None:
        """Refuse a tensor of the whole batch beside rows of it: it would count once a rank."""
        names = [name for name, tensor in plain.items() if self._has_rows(tensor)]
        counts = dict(zip(names, rows, strict=True))
        parts = {sum(each): name for name, each in counts.items() if sum(each)}
        # Of a batch of another size there may be so many by chance; that has other values, too.
        suspects = {
            name: parts[each[0]]
            for name, each in counts.items()
            if len(each) > 1 and set(each) == {each[0]} and each[0] in parts
        }
        # All ranks know all counts, so all of them come here, or none does.
        if not suspects:
            return
        with no_torch_function():
            found = self._told([checksum(plain[name]) for name in suspects])
        for at, (name, part) in enumerate(suspects.items()):
            if len({row[at] for row in found}) == 1:
                raise PlanError(
                    f"{name} has the same {counts[name][0]} rows on every rank, and {part} has "
                    f"{' + '.join(map(str, counts[part]))} of them. {_OWN_ROWS}"
                )

    def _require_same_values(self, plain: dict[str, Tensor]) -> None:
        values = {name: f"checksum {checksum(one):08x}" for name, one in plain.items()}
        rows = {name for name, one in plain.items() if self._has_rows(one)}
        here = self._shards[mesh_ranks(self.mesh).index(_rank())]
        pairs = zip(mesh_ranks(self.mesh), self._shards, strict=True)
        alike = [rank for rank, shard in pairs if shard == here]
        # Twice on every rank, also with nothing to compare: each is a collective of the whole mesh.
        for names, peers in ((rows, alike), (set(values) - rows, mesh_ranks(self.mesh))):
            require_same(
                {"value of": {name: one for name, one in values.items() if name in names}},
                peers=peers,
                head="the batches that enter the model differ between ranks:",
                advice={"value of": _REPLICAS},
                mesh=self.mesh,
            )

    def _placed(self, tensor: Tensor, counts: list[int]) -> Tensor:
        dim = self._dim(tensor)
        shape = list(tensor.shape)
        shape[dim] = sum(counts)
        wanted = placements(self.layout, self.mesh, tensor.ndim)
        # They lie as even shards do. Every rank knows all counts, so nothing is sent on any.
        if counts == row_counts(shape[dim], self._sizes):
            return self._of(tensor, wanted, shape)
        axes = [(a, n) for a, n in zip(self._axes, self._sizes, strict=True) if n > 1]
        if len(axes) == 1:
            lies = [
                RaggedShard((dim,), tuple(counts)) if axis == axes[0][0] else Replicate()
                for axis in mesh_sizes(self.mesh)
            ]
            moved: Tensor = self._of(tensor, lies, shape).redistribute(self.mesh, wanted)
            return moved
        if tensor.requires_grad:
            raise PlanError(
                f"a batch over {len(axes)} axes with rows {counts} asks for gradients: its rows "
                "have to be moved, which is not differentiated. Pass rows as torch.chunk has them."
            )
        group = group_of(self.mesh, tuple(axis for axis, _ in axes))
        # Uneven rows over several axes are no placement that a DTensor has: gathered, and each rank
        # keeps its shard.
        whole = all_gather(tensor.contiguous(), group, dim=dim, sizes=counts)
        everywhere = [Replicate()] * self.mesh.ndim
        placed: Tensor = DTensor.from_local(whole, self.mesh, everywhere).redistribute(
            self.mesh, wanted
        )
        return placed

    def _of(self, tensor: Tensor, where: Sequence[Any], shape: Sequence[int]) -> DTensor:
        # Said, as a rank cannot tell the global strides from its own rows.
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        local = tensor.contiguous()
        made: DTensor = DTensor.from_local(local, self.mesh, where, shape=shape, stride=strides)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalBatch":
        return self


def _plain(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one for name, one in named.items() if not isinstance(one, DTensor)}


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _padded(numbers_: Sequence[int], length: int) -> list[int]:
    return [*numbers_, *[0] * (length - len(numbers_))]


def _digest(forms: dict[str, str]) -> int:
    return digest(repr(sorted(forms.items())))
