"""`parallelize` makes each rank's elements of a deferred model, bitwise those of one device.

For every layout and ZeRO level; nothing but a bounded scratch is allocated besides; the ranks'
generators end where one device's ends.
"""

import re
from math import prod
from typing import Any

import pytest
import torch
from deferred_zoo import ZOO, Rotary
from peak import Peak
from torch import nn
from vescale_comm import simulate
from vescale_dtensor import DTensor
from vescale_parallel import (
    DisagreementError,
    Plan,
    StaleParameterError,
    Zero,
    deferred,
    parallelize,
)
from vescale_parallel import mesh as make_mesh
from vescale_parallel._deferred.models import is_deferred


class Everything(nn.Module):
    """All modules of the zoo, one after another."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"of_" + re.sub(r"\W+", "_", key): make() for key, make in ZOO.items()}
        self.parts = nn.ModuleDict(parts)


LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "replicated": ({"dp": 2}, {}),
    "rows": ({"tp": 3}, {"parameters": "tp:0"}),
    "columns": ({"tp": 2}, {"parameters": "tp:-1"}),
    "both": ({"dp": 2, "tp": 2}, {"parameters": "tp:-1, dp:0"}),
    "zero 1": ({"dp": 3}, {"zero": 1}),
    "zero 2": ({"dp": 2}, {"zero": 2}),
    "zero 3": ({"dp": 3}, {"zero": 3}),
    "zero 3 and tp": ({"dp": 2, "tp": 2}, {"parameters": "tp:0", "zero": 3}),
    "owned": ({"dp": 2}, {"zero": Zero(3, owned="*.weight")}),
    "in bfloat16": ({"dp": 2}, {"zero": 3, "precision": {"master": "bfloat16"}}),
}


def plan_of(model: nn.Module, words: dict[str, Any]) -> Plan:
    """A plan with one layout for all parameters that have such dims."""
    layout = words.get("parameters")
    least = 2 if layout and "-1" in layout else 1
    named = model.named_parameters(remove_duplicate=False)
    rules = {n: layout for n, p in named if layout and p.ndim >= least}
    words = {key: value for key, value in words.items() if key != "parameters"}
    axes = ("dp", "tp")
    return Plan(parameters=rules | {"*": "replicate"}, axes=axes, batch=None, **words)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Global values by name, also of buffers."""
    tensors = model.state_dict()
    return {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in tensors.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_module_of_the_zoo_in_every_layout(name: str):
    sizes, words = LAYOUTS[name]
    torch.manual_seed(4)
    expected = Everything()
    after = torch.rand(3)
    wanted = expected.state_dict()

    def rank(rank: int, size: int) -> None:
        torch.manual_seed(4)
        with deferred():
            model = Everything()
        parallelize(model, make_mesh(device_type="cpu", **sizes), plan_of(model, words))
        assert torch.equal(torch.rand(3), after)
        assert not is_deferred(model)
        found = values(model)
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert torch.equal(found[key], value.to(found[key].dtype)), key

    simulate(prod(sizes.values()))(rank)


def wide(layers: int = 6, width: int = 256) -> nn.Module:
    """Linear layers of 256 KiB each."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


LAYER = 256 * 256 * 4


@pytest.mark.parametrize(
    ("zero", "layout", "share"),
    # A unit of ZeRO is copied into its buffer: here the model is one unit.
    [(0, "dp:0", 1.5), (0, "dp:1", 1.5), (3, "replicate", 2 * 1.5), (1, "replicate", 6 + 1.5)],
)
def test_the_peak_is_what_the_rank_keeps_and_a_bounded_scratch(
    zero: int, layout: str, share: float
):
    def rank(rank: int, size: int) -> None:
        mesh = make_mesh(device_type="cpu", dp=4)
        with deferred():
            model = wide()
        plan = Plan(parameters={"*": layout}, zero=zero, batch=None)
        peak = Peak()
        with peak:
            parallelize(model, mesh, plan)
        # A draw's scratch, of half a megabyte, is no multiple of the model.
        assert peak.most <= share * LAYER + (1 << 19) + (1 << 16)

    simulate(4)(rank)


def test_a_model_that_is_not_deferred_is_there_once_and_one_parameter_more():
    def rank(rank: int, size: int) -> None:
        mesh = make_mesh(device_type="cpu", dp=2)
        peak = Peak()
        with peak:
            parallelize(wide(), mesh, Plan(batch=None))
        assert 6 * LAYER <= peak.most <= 7 * LAYER + (1 << 16)

    simulate(2)(rank)


def test_models_that_differ_between_ranks_are_told_before_anything_is_made():
    def rank(rank: int, size: int) -> None:
        mesh = make_mesh(device_type="cpu", dp=2)
        state = torch.get_rng_state()
        torch.manual_seed(5 + rank)
        with deferred():
            model = nn.Linear(3, 4)
        torch.set_rng_state(state)
        with pytest.raises(DisagreementError, match=r"value of 'weight': made by \w+ on rank 0"):
            parallelize(model, mesh)
        assert is_deferred(model)

    simulate(2)(rank)


def test_attributes_of_modules_hold_real_tensors_and_optimizers_the_new_parameters():
    def rank(rank: int, size: int) -> None:
        mesh = make_mesh(device_type="cpu", dp=2)
        with deferred():
            model = nn.Sequential(Rotary(), nn.LSTM(3, 4))
        old = next(model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallelize(model, mesh)
        assert type(model[0].kept[0]) is torch.Tensor
        assert model[0].original is model[0].inverse
        held = optimizer.param_groups[0]["params"]
        assert [id(one) for one in held] == [id(one) for one in model.parameters()]
        assert all(isinstance(one, DTensor) for one in model[1]._flat_weights)
        with pytest.raises(StaleParameterError):
            old.sum()
        torch.manual_seed(0)
        model[1](torch.randn(2, 5, 3))[0].sum().backward()
        optimizer.step()

    simulate(2)(rank)
