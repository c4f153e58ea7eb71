"""A model built under `deferred()` and materialised is bit by bit the one of one device.

So is the generator afterwards, whatever makes the tensors; and what would need storage says so.
"""

import copy
import io
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from deferred_zoo import ZOO, Rotary, Tied
from torch import nn
from vescale_parallel import DeferredError, deferred, materialize
from vescale_parallel._common import torch_compat
from vescale_parallel._deferred.models import is_deferred
from vescale_parallel._deferred.recording import DeferredTensor, value_of
from vescale_parallel._deferred.tape import making_of


def both(name: str) -> tuple[nn.Module, torch.Tensor, nn.Module, torch.Tensor]:
    """The module of one device and the deferred one, and the next numbers after each."""
    torch.manual_seed(1)
    expected, after = ZOO[name](), torch.rand(3)
    torch.manual_seed(1)
    with deferred():
        model = ZOO[name]()
    return expected, after, model, torch.rand(3)


@pytest.mark.parametrize("name", ZOO)
def test_materialised_is_what_one_device_builds(name: str):
    expected, after, model, found_after = both(name)
    assert torch.equal(found_after, after)
    assert is_deferred(model) or name == "numpy"
    state = torch.get_rng_state()
    assert materialize(model) is model
    assert torch.equal(torch.get_rng_state(), state)
    assert not is_deferred(model)
    wanted, found = expected.state_dict(), model.state_dict()
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key
        assert type(found[key]) is type(value)
        assert (found[key].stride(), found[key].dtype) == (value.stride(), value.dtype)
    trained = {key: p.requires_grad for key, p in expected.named_parameters()}
    assert {key: p.requires_grad for key, p in model.named_parameters()} == trained


class Tables(NamedTuple):
    cos: torch.Tensor
    name: str


@dataclass(frozen=True)
class Frozen:
    table: torch.Tensor
    more: Any = None


def test_tensors_in_whatever_a_module_holds():
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.named = Tables(torch.arange(3.0), "cos")
            self.frozen = Frozen(torch.ones(2), [torch.zeros(1)])
            self.ordered = OrderedDict(one=torch.full((2,), 3.0), user=UserDict(x=torch.ones(1)))
            self.ring = [torch.ones(1)]
            self.ring.append(self.ring)

    with deferred():
        model = Holder()
    frozen, ordered = model.frozen, model.ordered
    materialize(model)
    found = [
        model.named.cos,
        model.frozen.table,
        model.frozen.more[0],
        model.ordered["one"],
        model.ordered["user"]["x"],
        model.ring[0],
    ]
    assert all(type(one) is torch.Tensor for one in found)
    assert torch.equal(model.named.cos, torch.arange(3.0))
    assert (type(model.named), model.named.name) == (Tables, "cos")
    assert model.frozen is frozen
    assert model.ordered is ordered
    assert model.ring[1] is model.ring


def test_what_is_shared_stays_shared_and_attributes_get_values_too():
    with deferred():
        tied, rotary = Tied(), Rotary()
        tied.embed.weight.decays = False
    materialize(tied)
    materialize(rotary)
    assert tied.head.weight is tied.embed.weight
    assert tied.embed.weight.decays is False
    assert type(tied.embed.weight) is nn.Parameter
    assert rotary.original is rotary.inverse
    assert type(rotary.kept[0]) is torch.Tensor
    assert torch.equal(rotary.kept[0], Rotary().kept[0])
    assert rotary.rates == Rotary().rates


def test_a_tensor_copied_to_itself_is_not_overwritten():
    def built() -> nn.Linear:
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        with torch.no_grad():
            layer.weight.copy_(layer.weight)
            layer.bias.fill_(7.0)
            layer.bias.copy_(layer.bias)
        return layer

    with deferred():
        layer = built()
    for found, expected in zip(materialize(layer).parameters(), built().parameters(), strict=True):
        assert torch.equal(found, expected)


def test_what_follows_after_the_block_is_recorded_too():
    torch.manual_seed(2)
    expected = nn.Linear(4, 3).to(torch.bfloat16)
    nn.init.normal_(expected.weight)
    torch.manual_seed(2)
    with deferred():
        model = nn.Linear(4, 3)
    model = copy.deepcopy(model).to(torch.bfloat16)
    nn.init.normal_(model.weight)
    assert is_deferred(model)
    assert torch.equal(materialize(model).weight, expected.weight)
    assert torch.equal(model.bias, expected.bias)


def test_nothing_is_allocated_and_overwritten_numbers_are_not_drawn():
    with deferred():
        model = nn.Linear(1 << 20, 1 << 20)
        nn.init.zeros_(model.weight)
    assert isinstance(model.weight, DeferredTensor)
    assert (model.weight.device.type, model.weight.dtype) == ("cpu", torch.float32)
    making = making_of(value_of(model.weight))
    drawn = [one.name for one in making.steps if one not in making.hollow and one.draw]
    assert drawn == []


def test_values_that_code_asks_for_are_those_of_one_device():
    torch.manual_seed(3)
    expected = torch.randn(40)
    torch.manual_seed(3)
    with deferred():
        tensor = torch.randn(40)
        assert tensor[7].item() == expected[7].item()
        assert tensor.tolist() == expected.tolist()
        assert bool((tensor.sum() > 0) == (expected.sum() > 0))
        assert float(tensor.max()) == float(expected.max())
        assert torch.equal(tensor.nonzero(), expected.nonzero())
        assert torch.equal(tensor[tensor > 0], expected[expected > 0])
        target = torch.from_numpy(expected.numpy().copy())
        target.copy_(tensor * 2)
    assert torch.equal(target, expected * 2)
    assert "DeferredTensor((40,), float32" in repr(tensor)


@pytest.mark.parametrize(
    "use", [lambda t: t.data_ptr(), lambda t: torch.save(t, io.BytesIO()), lambda t: t.resize_(3)]
)
def test_what_asks_for_memory_is_refused(use):
    with deferred():
        tensor = torch.zeros(4)
    with pytest.raises(DeferredError, match=r"deferred\(\)"):
        use(tensor)


def test_a_real_tensor_that_is_written_to_after_it_was_read_is_an_error():
    large = torch.ones(100, 100)
    with deferred():
        module = nn.ParameterList([nn.Parameter(torch.zeros(100, 100) + large)])
    large.add_(1)
    with pytest.raises(DeferredError, match="has been written to since"):
        materialize(module)
    small = torch.ones(3)
    with deferred():
        module = nn.ParameterList([nn.Parameter(torch.zeros(3) + small)])
    small.add_(1)
    assert materialize(module)[0].tolist() == [1, 1, 1]


def test_the_default_dtype_is_that_of_the_time_of_building():
    torch.set_default_dtype(torch.float64)
    try:
        expected = torch.arange(5) / 3
        with deferred():
            module = nn.ParameterList([nn.Parameter(torch.arange(5) / 3), torch.zeros(3)])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(materialize(module)[0], expected)
    assert module[1].dtype == torch.float64


def test_a_torch_that_lacks_what_it_needs_is_named(monkeypatch):
    monkeypatch.setattr(torch_compat, "_make_wrapper", None)
    said = r"needs 'torch.Tensor._make_wrapper_subclass'"
    with pytest.raises(DeferredError, match=said), deferred():
        pass
