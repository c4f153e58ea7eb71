"""`torch.compile` of a model in stages just runs: eager mode's bits."""

import warnings
from typing import Any

import pytest
import torch
from stage_runs import batch, make, plan
from vescale_comm.testing import run
from vescale_parallel import forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from zero_models import whole


def compiled(rank: int, world_size: int, which: str) -> None:
    torch.compiler.reset()
    found: list[list[Any]] = []
    for how in ("eager", which):
        model = make(True)
        parallelize(model, make_mesh(device_type="cpu", pp=2), plan("1f1b", 2))
        if how == "model":
            model.compile(backend="eager")
        elif how == "blocks":
            for block in model.blocks:
                block.compile(backend="eager")
        values: list[Any] = []
        with warnings.catch_warnings():
            # The compiler's own, of plain tensors with a history among its arguments.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            for step in range(2):
                torch.manual_seed(step)
                values.append(forward_backward(model, *batch(step)))
                with torch.no_grad():
                    values.append(model(*batch(step)))
        values += [whole(one.grad) for one in model.parameters() if one.grad is not None]
        found.append(values)
    eager, other = found
    assert len(eager) == len(other) > 4
    for one, two in zip(eager, other, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("which", ["model", "blocks"])
def test_compiled_stages_run_as_they_are(which: str):
    run(compiled, 2, which)
