"""`forward_backward` is a forward and a backward; parts of its arguments are those of one batch."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vescale_parallel import ParallelError, forward_backward
from vescale_parallel._step.parts import Part, loss_of


def test_a_plain_model_runs_once_on_the_whole_batch():
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(5, 3), torch.randn(5, 2)
    loss = forward_backward(model, x, loss=(nn.functional.mse_loss, y))
    assert not loss.requires_grad
    found = model.weight.grad.clone()
    model.zero_grad()
    expected = nn.functional.mse_loss(model(x), y)
    expected.backward()
    assert torch.equal(loss, expected.detach())
    assert torch.equal(found, model.weight.grad)
    with torch.no_grad():
        assert torch.equal(forward_backward(model, x, loss=(nn.functional.mse_loss, y)), loss)


def test_parts_are_views_of_the_rows():
    batch = {"tokens": torch.arange(10).view(5, 2), "scale": torch.tensor(2.0), "name": "x"}
    part = Part.of((torch.arange(5),), batch, (nn.functional.mse_loss, torch.arange(5)))
    first = lambda t: 0 if t.ndim else None  # noqa: E731
    assert part.rows(first) == 5
    one, two = part.cut(first, [2, 3])
    assert two.kwargs["tokens"].tolist() == batch["tokens"][2:].tolist()
    assert two.kwargs["scale"] is batch["scale"]
    assert two.args[0].tolist() == two.targets[0].tolist() == [2, 3, 4]
    assert one.kwargs["tokens"].data_ptr() == batch["tokens"].data_ptr()


def test_what_is_no_loss_or_no_batch_is_named():
    with pytest.raises(ParallelError, match="a function of the model's output"):
        Part.of((), {}, "mean")
    with pytest.raises(ParallelError, match="one number as the loss"):
        loss_of(Part.of((), {}, None), torch.zeros(3))
    part = Part.of((torch.zeros(4),), {"mask": torch.zeros(3)}, None)
    with pytest.raises(ParallelError, match=r"4 rows in .*args.*; 3 rows in .*mask"):
        part.rows(lambda t: 0)
    value = torch.tensor(1.0)
    for output in (value, {"loss": value}, SimpleNamespace(loss=value)):
        assert loss_of(Part.of((), {}, None), output) is value
        assert loss_of(replace(Part.of((), {}, None), scale=0.25), output) == 0.25
