"""Real tensors that steps of a deferred model read are cut as the parameter is, or used whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from vescale_comm import simulate
from vescale_parallel import Plan, deferred, parallelize
from vescale_parallel import mesh as make_mesh

VALUES, ROW = torch.arange(30.0).view(6, 5) / 30, torch.arange(5.0)


def assigned(p: nn.Parameter) -> None:
    p.data = VALUES.clone()


def copied(p: nn.Parameter) -> None:
    p.copy_(VALUES)


def copied_from_numpy(p: nn.Parameter) -> None:
    p.data.copy_(torch.from_numpy(VALUES.numpy()))


def indexed(p: nn.Parameter) -> None:
    p[:] = VALUES


def a_part_indexed(p: nn.Parameter) -> None:
    p[1:4] = VALUES[1:4]


def added(p: nn.Parameter) -> None:
    p.add_(VALUES)


def times_a_row(p: nn.Parameter) -> None:
    p.mul_(ROW)


def times_a_number(p: nn.Parameter) -> None:
    p.mul_(torch.tensor(2.0)).fill_(torch.tensor(0.5)).add_(torch.tensor([1.0]))


def chosen(p: nn.Parameter) -> None:
    p.data = torch.where(VALUES > 0.5, p.data, VALUES)


def masked(p: nn.Parameter) -> None:
    p.masked_fill_(VALUES > 0.5, 3.0)


def in_another_dtype(p: nn.Parameter) -> None:
    p.data = VALUES.double()
    p.data = p.data.float()


def transposed(p: nn.Parameter) -> None:
    p.t().copy_(VALUES.t())


WRITES: list[Callable[[Any], None]] = [
    assigned,
    copied,
    copied_from_numpy,
    indexed,
    a_part_indexed,
    added,
    times_a_row,
    times_a_number,
    chosen,
    masked,
    in_another_dtype,
    transposed,
]


class Written(nn.Module):
    """A parameter for each way to write, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ParameterDict({one.__name__: torch.randn(6, 5) for one in WRITES})
        self.gain = nn.Parameter(torch.ones(()))
        self.copied_gain = nn.Parameter(torch.ones(()))


def written(model: Any) -> Any:
    with torch.no_grad():
        for one in WRITES:
            one(model.of[one.__name__])
        model.gain.data = torch.tensor(3.0)
        model.copied_gain.copy_(torch.tensor(3.0))
    return model


def loaded(model: nn.Module) -> Any:
    torch.manual_seed(1)
    model.load_state_dict(written(Written()).state_dict())
    return model


@pytest.mark.parametrize("change", [written, loaded])
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp": 2}, {"zero": 0}),
        ({"dp": 3}, {"zero": 3}),
        ({"tp": 2}, {"parameters": {"of.*": "tp:0", "*": "replicate"}}),
        ({"dp": 2, "tp": 2}, {"parameters": {"of.*": "tp:1", "*": "replicate"}, "zero": 1}),
    ],
    ids=["zero0", "zero3", "tp", "tp zero1"],
)
def test_the_bits_of_one_device(change: Any, sizes: dict[str, int], words: dict[str, Any]):
    torch.manual_seed(0)
    expected = change(Written()).state_dict()

    def on_a_rank(rank: int, world_size: int) -> None:
        for within in (True, False):
            torch.manual_seed(0)
            with deferred():
                model: Any = Written()
                if within:
                    change(model)
            if not within:
                change(model)
            plan = Plan(**{"parameters": {"*": "replicate"}} | words, batch=None, axes=("dp", "tp"))
            parallelize(model, make_mesh(device_type="cpu", **sizes), plan)
            for name, one in model.state_dict().items():
                assert torch.equal(one.full_tensor(), expected[name]), name

    simulate(torch.Size(sizes.values()).numel()).run(on_a_rank)
