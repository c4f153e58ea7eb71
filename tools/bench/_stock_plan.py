"""The example model on a mesh (dp, tp) by torch alone: tensor and sequence parallel, then FSDP2.

All that a user writes for it, after torch's tensor parallel tutorial
(https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html). The model needs no edits: it
infers its head counts from the width of what it gets, where Llama divides them by hand.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def parallelize_by_torch(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Lay the example model out over the axes `dp` and `tp` of a mesh."""
    root_plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], root_plan)
    for block in model.get_submodule("blocks").children():
        block_plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None),
                desired_input_layouts=(Replicate(), None, None),
            ),
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "mlp_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),),
                desired_input_layouts=(Replicate(),),
            ),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh["tp"], block_plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def own_part(batch: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's sequences of a batch."""
    return batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
