"""`torch.compile` of a model in stages runs it as it is, and says so: eager mode's bits."""

import warnings
from typing import Any

import pytest
import torch
from stage_runs import batch, make, plan
from torch import nn
from vescale_comm.testing import on_ranks
from vescale_parallel import forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from zero_models import whole


def compile(model: nn.Module, how: str) -> nn.Module:
    if how == "model" and model._compiled_call_impl is None:
        model.compile(backend="eager")
    elif how == "blocks":
        for block in model.blocks:
            block.compile(backend="eager")
    return torch.compile(model, backend="eager") if how == "wrapped" else model


@pytest.mark.parametrize("which", ["model", "blocks", "wrapped"])
@on_ranks(2)
def test_compiled_stages_run_as_they_are(which: str):
    torch.compiler.reset()
    found: list[list[Any]] = []
    for how in ("eager", which):
        model = make(True)
        parallelize(model, make_mesh(device_type="cpu", pp=2), plan("1f1b", 2))
        values: list[Any] = []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(3):
                # The first step is not compiled: what it has learned holds for the others.
                called = compile(model, how) if step else model
                torch.manual_seed(step)
                values.append(forward_backward(called, *batch(step)))
                with torch.no_grad():
                    values.append(model(*batch(step)))
        said = [str(one.message) for one in told if "as it is" in str(one.message)]
        assert bool(said) == (how != "eager"), (how, said)
        values += [whole(one.grad) for one in model.parameters() if one.grad is not None]
        found.append(values)
    eager, other = found
    assert len(eager) == len(other) > 4
    for one, two in zip(eager, other, strict=True):
        assert torch.equal(one, two)
