"""Hooks at the boundaries of modules: redistribute what enters and leaves, as the plan says.

Every decision here is made from types, dims and placements, which are the same on all ranks, so no
rank skips a redistribution that another one waits in.
"""

from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_dtensor import DTensor, Replicate

from vescale_parallel._agreement import checksum, require_same
from vescale_parallel._errors import PlanError
from vescale_parallel._layout import Layout
from vescale_parallel._mesh import mesh_ranks, mesh_sizes
from vescale_parallel._placements import placements
from vescale_parallel._pytree import map_tensors, named_tensors_within
from vescale_parallel._report_rows import BoundaryRow
from vescale_parallel._torch_compat import no_torch_function

_CHECKED_BATCHES: Final = 2
"""How many batches are compared between ranks: a loader that is wrong is wrong from the start."""

_WHOLE_BATCH: Final = (
    "Pass the whole batch on every rank: the plan's 'batch' layout says which shard of it each "
    "rank keeps. A batch that is split already is passed as DTensor.from_local(part, mesh, ...)."
)


def install_boundary(module: nn.Module, row: BoundaryRow, mesh: DeviceMesh) -> None:
    """Redistribute the distributed tensors that enter and leave `module`, as `row` says.

    Plain tensors pass as they are: they count as replicated, and tables such as rotary cosines
    travel beside the activations that the rule is about.
    """
    axes = mesh_sizes(mesh)
    inputs, outputs = row.boundary.inputs, row.boundary.outputs
    # A side that says nothing about the axes of this mesh needs no hook.
    if inputs is not None and any(inputs.covers(axis) for axis in axes):
        enter = _Redistribute(row, inputs, mesh, "enters")
        module.register_forward_pre_hook(enter.arguments, with_kwargs=True)
    if outputs is not None and any(outputs.covers(axis) for axis in axes):
        leave = _Redistribute(row, outputs, mesh, "leaves")
        module.register_forward_hook(leave.result)


class _Redistribute:
    """One side of one rule, as the hooks of one module."""

    def __init__(self, row: BoundaryRow, layout: Layout, mesh: DeviceMesh, verb: str) -> None:
        self.row, self.layout, self.mesh, self.verb = row, layout, mesh, verb

    def arguments(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The forward pre-hook."""
        return map_tensors(self._tensor, args), map_tensors(self._tensor, kwargs)

    def result(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The forward hook."""
        return map_tensors(self._tensor, output)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if tensor.ndim < self.layout.least_ndim:
            raise PlanError(
                f"activation rule '{self.row.rule}': a tensor of shape {tuple(tensor.shape)} "
                f"{self.verb} '{self.row.module}', and '{self.layout}' shards a dim that it lacks."
            )
        # Dims, not sizes, decide: an activation may be smaller than the mesh, and its shards empty.
        wanted = placements(self.layout, self.mesh, tensor.ndim, unnamed=tensor.placements)
        placed: Tensor = tensor.redistribute(self.mesh, wanted)
        return placed

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Redistribute":
        # A copy of the model lies on the same mesh; process groups cannot be copied.
        return self


class DistributeBatch:
    """The root's forward pre-hook: plain tensors become shards of the global batch.

    The first batches are compared between ranks, because passing each rank its own shard where the
    whole batch is expected trains wrongly and looks right.
    """

    def __init__(self, layout: Layout, mesh: DeviceMesh) -> None:
        self.layout, self.mesh = layout, mesh
        self._unchecked = _CHECKED_BATCHES

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Distribute arguments and keyword arguments."""
        if self._unchecked > 0:
            self._unchecked -= 1
            with no_torch_function():  # not a part of what a recording repeats
                self._require_same(args, kwargs)
        return map_tensors(self._tensor, args), map_tensors(self._tensor, kwargs)

    def _require_same(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = named_tensors_within(args, "args") | named_tensors_within(kwargs, "kwargs")
        plain = {name: one for name, one in found.items() if not isinstance(one, DTensor)}
        facts = {
            "tensor": {name: f"{tuple(one.shape)} {one.dtype}" for name, one in plain.items()},
            "value of": {name: f"checksum {checksum(one):08x}" for name, one in plain.items()},
        }
        head = "the batches that enter the model differ between ranks:"
        peers = mesh_ranks(self.mesh)
        require_same(facts, peers=peers, head=head, advice=dict.fromkeys(facts, _WHOLE_BATCH))

    def _tensor(self, tensor: Tensor) -> Tensor:
        # A tensor without the batch dim (a scale, a table) stays plain, which means replicated.
        if isinstance(tensor, DTensor) or tensor.ndim < max(self.layout.least_ndim, 1):
            return tensor
        # Every rank holds the whole batch, so each keeps its shard and nothing is sent. Unlike
        # `distribute_tensor` this makes no new leaf: gradients reach an input that asks for them.
        replicated = DTensor.from_local(tensor, self.mesh, [Replicate()] * self.mesh.ndim)
        shard: Tensor = replicated.redistribute(
            self.mesh, placements(self.layout, self.mesh, tensor.ndim)
        )
        return shard

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributeBatch":
        return self
