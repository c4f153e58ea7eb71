"""Styles of layers with parameters: by columns, by rows, and along the sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._layout.placements import Replicate, Shard
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor.parallel._style import (
    ParallelStyle,
    Placements,
    distribute_layer,
    distribute_parameter,
    laid_out,
    placement_of,
)

# The dim that parameters of a kind of layer are sharded along; None: replicated.
Dims = Mapping[type[nn.Module], Mapping[str, int | None]]


class _ShardedLayer(ParallelStyle):
    """What layers whose weights are sharded have in common.

    Attributes:
        input_layouts, output_layouts: of a plain input; of the output.
        desired_input_layouts: the layout that the layer itself takes.
        use_local_output: whether the output is the local tensor, and no DTensor.
    """

    _dims: ClassVar[Dims]

    input_layouts: Placements
    output_layouts: Placements
    desired_input_layouts: Placements
    use_local_output: bool

    def _desired_input_layouts(self, module: nn.Module) -> Placements:
        return self.desired_input_layouts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        kind = next((kind for kind in self._dims if isinstance(module, kind)), None)
        if kind is None:
            known = " and ".join(f"nn.{kind.__name__}" for kind in self._dims)
            # The type that torch raises: its callers catch that one.
            raise NotImplementedError(
                f"{type(self).__name__} knows {known}, found {type(module).__name__}. Give its "
                "submodules a style each, or use distribute_module()"
            )
        dims, desired = self._dims[kind], self._desired_input_layouts(module)
        name = f"{type(self).__name__} of {type(module).__name__}"
        whole = _input_shape(module, self.input_layouts)

        def partition(layer: nn.Module) -> None:
            for parameter in list(layer._parameters):
                dim = dims.get(parameter)
                placement = Replicate() if dim is None else Shard(dim)
                distribute_parameter(layer, parameter, device_mesh, placement, self.src_data_rank)

        def enter(value: Any) -> DTensor:
            return laid_out(name, value, device_mesh, self.input_layouts, desired, whole)

        def leave(value: Any) -> Tensor:
            made = laid_out(name, value, device_mesh, self.output_layouts, self.output_layouts)
            return made.to_local() if self.use_local_output else made

        return distribute_layer(module, device_mesh, partition, enter, leave)


def _input_shape(module: nn.Module, found: Placements) -> Any:
    """A function that tells the global shape of a plain input of a layer, where that is known."""
    features = getattr(module, "in_features", None)

    def shape(local: Tensor) -> Sequence[int] | None:
        (placement,) = found
        if not isinstance(placement, Shard) or features is None or not local.ndim:
            return None
        # Sharded along the features, whose number the layer knows. Along another dim the ranks
        # have to ask each other, since shards may be uneven.
        last = placement.dim in (-1, local.ndim - 1)
        return (*local.shape[:-1], features) if last else None

    return shape


class ColwiseParallel(_ShardedLayer):
    """Shard `nn.Linear` along its output features, or `nn.Embedding` along its features.

    The signature is that of `torch.distributed.tensor.parallel.ColwiseParallel`.

    Args:
        input_layouts: the layout of a plain input. Default: replicated.
        output_layouts: the layout of the output. Default: sharded along its last dim.
        use_local_output: return the local tensor, and no DTensor.

    Examples:
        parallelize_module(mlp, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    """

    _dims: ClassVar[Dims] = {nn.Linear: {"weight": 0, "bias": 0}, nn.Embedding: {"weight": 1}}

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        """See the class."""
        super().__init__()
        self.input_layouts = (placement_of(input_layouts or Replicate()),)
        self.output_layouts = (placement_of(output_layouts or Shard(-1)),)
        self.desired_input_layouts = (Replicate(),)
        self.use_local_output = use_local_output


class RowwiseParallel(_ShardedLayer):
    """Shard `nn.Linear` along its input features, or `nn.Embedding` along its rows.

    The signature is that of `torch.distributed.tensor.parallel.RowwiseParallel`. The output is a
    partial sum, which is then reduced into `output_layouts`; the bias of a linear layer is added
    once.

    Args:
        input_layouts: the layout of a plain input. Default: sharded along its last dim, which is
            that of a linear layer; indices of an embedding are commonly replicated.
        output_layouts: the layout of the output. Default: replicated.
        use_local_output: return the local tensor, and no DTensor.
    """

    _dims: ClassVar[Dims] = {nn.Linear: {"weight": 1, "bias": None}, nn.Embedding: {"weight": 0}}

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        """See the class."""
        super().__init__()
        self.input_layouts = (placement_of(input_layouts or Shard(-1)),)
        self.output_layouts = (placement_of(output_layouts or Replicate()),)
        self.desired_input_layouts = (Shard(-1),)
        self.use_local_output = use_local_output

    def _desired_input_layouts(self, module: nn.Module) -> Placements:
        return (Replicate(),) if isinstance(module, nn.Embedding) else self.desired_input_layouts


class SequenceParallel(ParallelStyle):
    """Replicate the parameters of a module, and run it on an input sharded along the sequence.

    The signature is that of `torch.distributed.tensor.parallel.SequenceParallel`. For norms,
    dropout, and any module that works along other dims than the sequence. Parameters are those of
    `src_data_rank`; torch's style takes those of each rank, on trust.

    Args:
        sequence_dim: the dim of the input that is sharded. A plain input is this rank's shard.
        use_local_output: return the local tensor, and no DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        """See the class."""
        super().__init__()
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name, layout = f"SequenceParallel of {type(module).__name__}", self.sequence_sharding

        def partition(layer: nn.Module) -> None:
            for parameter in list(layer._parameters):
                distribute_parameter(layer, parameter, device_mesh, Replicate(), self.src_data_rank)

        def enter(value: Any) -> DTensor:
            return laid_out(name, value, device_mesh, layout, layout)

        def leave(value: Any) -> Any:
            # What the module computes lies as the operations leave it, as in torch's.
            if not self.use_local_output:
                return value
            if not isinstance(value, DTensor):
                raise LayoutError(f"{name}: expected a DTensor as its output, found {type(value)}")
            return value.to_local()

        return distribute_layer(module, device_mesh, partition, enter, leave)
