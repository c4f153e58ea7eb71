"""Errors that a library meets with DTensors name the integration, and the line to write."""

import pytest
import torch
import torch.distributed as dist
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import DTensor, Replicate, UnsupportedError, distribute_tensor

CALLS = {
    "gathers": lambda x: dist.all_reduce(x),
    "pickles": lambda x: x.__reduce_ex__(2),
    "memory": lambda x: x.untyped_storage(),
}
TRAINER, SAVED = r"transformers\.parallel\(Trainer\)\(", r"save_model\(folder\): every rank"
# Libraries from the outermost one on; what they come to; what is said.
CASES = [
    (["transformers.trainer", "accelerate.accelerator"], "gathers", TRAINER),
    (["accelerate.accelerator"], "gathers", r"accelerate\.Accelerator\(mesh=mesh, plan=plan\)"),
    (["lightning.fabric.wrappers"], "gathers", r"lightning\.FabricStrategy\(mesh, plan\)"),
    (["lightning.pytorch.trainer"], "pickles", r"lightning\.TrainerStrategy\(mesh, plan\)"),
    (["torchmetrics.metric"], "gathers", r"torchmetrics\.of_whole_batches\(metric\)"),
    (["transformers.modeling_utils"], "memory", SAVED),
    (["peft.peft_model", "transformers.modeling_utils"], "memory", SAVED),
    (["transformers.trainer", "transformers.modeling_utils"], "memory", TRAINER),
]
OURS = "vescale_parallel.integrations.transformers"
SILENT = [["mine"], ["transformers.models.llama"], ["transformers.trainer", OURS]]


def within(libraries, call, x: DTensor):
    """The call, made by functions of these modules, the first of which is called first."""
    for name in reversed(libraries):
        scope = {"__name__": name, "call": call}
        exec("def inner(x):\n    return call(x)\n", scope)
        call = scope["inner"]
    return call(x)


def test_the_outermost_library_is_told_its_line():
    def on_a_rank(rank, world):
        x = distribute_tensor(torch.ones(4), device_mesh((2,), ("dp",)), [Replicate()])
        for libraries, what, said in CASES:
            with pytest.raises(UnsupportedError, match=said):
                within(libraries, CALLS[what], x)
        for libraries in SILENT:
            with pytest.raises(UnsupportedError) as caught:
                within(libraries, CALLS["gathers"], x)
            assert "vescale_parallel.integrations" not in str(caught.value)

    simulate(2)(on_a_rank)
