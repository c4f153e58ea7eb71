"""Hooks at the boundaries of modules: redistribute what enters and leaves, as the plan says.

Every decision here is made from types, dims and placements, which are the same on all ranks, so no
rank skips a redistribution that another one waits in.
"""

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm.nested import Copied, map_tensors, named_tensors_within
from vescale_dtensor import DTensor, Placement, Replicate, untraced

from vescale_parallel._apply.placements import placements
from vescale_parallel._apply.write_back import WrittenBack
from vescale_parallel._common.agreement import checksum, require_same
from vescale_parallel._common.mesh import mesh_ranks, mesh_sizes
from vescale_parallel._common.pickle_refusal import NotPickled
from vescale_parallel._common.torch_compat import no_torch_function
from vescale_parallel._errors import PlanError
from vescale_parallel._notation.arguments import argument_names, place_arguments, place_results
from vescale_parallel._notation.layout import Chosen, RuleLayout
from vescale_parallel._notation.rows import BoundaryRow

_CHECKED_BATCHES: Final = 2
"""How many batches are compared between ranks: a loader that is wrong is wrong from the start."""

_WHOLE_BATCH: Final = (
    "Pass the whole batch on every rank: the plan's 'batch' layout says which shard of it each "
    "rank keeps. A batch that is split already: Plan(batch_is='local')."
)


def install_boundary(module: nn.Module, row: BoundaryRow, mesh: DeviceMesh) -> None:
    """Redistribute the distributed tensors that enter and leave `module`, as `row` says.

    Plain tensors pass as they are: they count as replicated, and tables such as rotary cosines
    travel beside the activations that the rule is about. A side that names arguments or results
    leaves the others alone.
    """
    axes = mesh_sizes(mesh)
    inputs, outputs = row.boundary.inputs, row.boundary.outputs
    # A side that says nothing about the axes of this mesh needs no hook.
    if inputs is not None and any(inputs.covers(axis) for axis in axes):
        enter = _Redistribute(module, row, inputs, mesh, "enters")
        module.register_forward_pre_hook(enter.arguments, with_kwargs=True)
    if outputs is not None and any(outputs.covers(axis) for axis in axes):
        leave = _Redistribute(module, row, outputs, mesh, "leaves")
        module.register_forward_hook(leave.result)


class _Redistribute(NotPickled):
    """One side of one rule, as the hooks of one module."""

    def __init__(
        self,
        module: nn.Module,
        row: BoundaryRow,
        side: RuleLayout | Chosen,
        mesh: DeviceMesh,
        verb: str,
    ) -> None:
        self.row, self.side, self.mesh, self.verb = row, side, mesh, verb
        # Asked once: signatures are slow, and this runs at every call.
        self.names = argument_names(module)[0] if isinstance(side, Chosen) else []
        self.back = WrittenBack()

    @untraced
    def arguments(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the forward pre-hook."""
        copied: Copied = []

        def place(layout: RuleLayout, value: Any) -> Any:
            return map_tensors(lambda one: self._tensor(layout, one), value, copied=copied)

        if isinstance(self.side, Chosen):
            found = place_arguments(self.names, self.side, place, args, kwargs)
        else:
            side = self.side
            found = place(side, args), {key: place(side, one) for key, one in kwargs.items()}
        self.back.watch(module, copied)
        return found

    @untraced
    def result(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the forward hook."""
        if isinstance(self.side, Chosen):
            return place_results(self.row.rule, self.row.module, self.side, self._place, output)
        return self._place(self.side, output)

    def _place(self, layout: RuleLayout, value: Any) -> Any:
        return map_tensors(lambda tensor: self._tensor(layout, tensor), value)

    def _tensor(self, layout: RuleLayout, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if tensor.ndim < layout.least_ndim:
            raise PlanError(
                f"activation rule '{self.row.rule}': a tensor of shape {tuple(tensor.shape)} "
                f"{self.verb} '{self.row.module}', and '{layout}' shards a dim that it lacks. Say "
                "which arguments or results are meant, as in '0 = tp:full -> 0 = tp:1'."
            )
        # Dims, not sizes, decide: an activation may be smaller than the mesh, and its shards empty.
        wanted = placements(layout, self.mesh, tensor.ndim, unnamed=tensor.placements)
        placed: Tensor = tensor.redistribute(self.mesh, wanted)
        return placed

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Redistribute":
        # A copy of the model is on the same mesh; process groups cannot be copied.
        return self


class DistributeBatch(NotPickled):
    """The root's forward pre-hook: plain tensors become shards of the global batch.

    The first batches are compared between ranks, because passing each rank its own shard where the
    whole batch is expected trains wrongly and looks right. Later ones are looked at now and then,
    without a collective: a loader or an augmentation may drift.

    Args:
        layout: of the batch.
        mesh: of the activations.
        compares: whether batches are compared here; stages do not come here at one time.
    """

    def __init__(self, layout: RuleLayout, mesh: DeviceMesh, *, compares: bool = True) -> None:
        self.layout, self.mesh = layout, mesh
        checked = _CHECKED_BATCHES if compares else 0
        # Apart: a loop that distributes labels by itself has the model's own batches compared, too.
        self._unchecked = {"the model": checked, "outside": checked}
        self.back = WrittenBack()

    @untraced
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Distribute arguments and keyword arguments."""
        copied: Copied = []
        placed = self.distributed(args, kwargs, copied, "the model")
        self.back.watch(module, copied)
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
        """See `Distribution` in `_step/distribute_batch.py`; `of`: whose first batches count.

        Whole batches are compared one by one: what is `beside` them does not matter.
        """
        if self._unchecked[of] > 0:
            # Counted down alike on every rank, as batches come alike: all of them come to the
            # comparison, or none does.
            self._unchecked[of] -= 1
            with no_torch_function():  # not a part of what a recording repeats
                self._require_same(args, kwargs)
        placed = map_tensors(self._tensor, args, copied=copied)
        named = {k: map_tensors(self._tensor, one, copied=copied) for k, one in kwargs.items()}
        return placed, named

    def _require_same(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = named_tensors_within(args, "args") | named_tensors_within(kwargs, "kwargs")
        # Of a distributed tensor the local parts are meant to differ.
        plain = {name: one for name, one in found.items() if not isinstance(one, DTensor)}
        facts = {
            "tensor": {name: f"{tuple(one.shape)} {one.dtype}" for name, one in plain.items()},
            "value of": {name: f"checksum {checksum(one):08x}" for name, one in plain.items()},
        }
        head = "the batches that enter the model differ between ranks:"
        peers = mesh_ranks(self.mesh)
        advice = dict.fromkeys(facts, _WHOLE_BATCH)
        require_same(facts, peers=peers, head=head, advice=advice, mesh=self.mesh)

    def _tensor(self, tensor: Tensor) -> Tensor:
        # A tensor without the batch dim (a scale, a table) stays plain, which means replicated.
        if isinstance(tensor, DTensor) or tensor.ndim < max(self.layout.least_ndim, 1):
            return tensor
        # Every rank has the global batch, so each keeps its shard and nothing is sent. Unlike
        # `distribute_tensor` this makes no new leaf: gradients reach an input that asks for them.
        everywhere = [Replicate()] * self.mesh.ndim
        replicated = DTensor.from_local(tensor, self.mesh, everywhere, run_check="sampled")
        shard: Tensor = replicated.redistribute(self.mesh, self._placements(tensor))
        return shard

    def _placements(self, tensor: Tensor) -> list[Placement]:
        # A dim of one behind the rows is no sequence: that of heads, in a mask of (rows, 1, tokens,
        # tokens). Sharded, one rank would have the mask, and send it to the others in each layer.
        ones = [dim for dim in range(1, tensor.ndim) if tensor.shape[dim] == 1]
        return [
            Replicate() if any(map(one.is_sharded, ones)) else one
            for one in placements(self.layout, self.mesh, tensor.ndim)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributeBatch":
        return self
