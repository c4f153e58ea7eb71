"""What changes in a model between two walks is found, though mostly nothing is looked for anew."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from vescale_comm.testing import on_ranks
from vescale_parallel import Plan, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel._pipeline.plan.model_walk import Walker
from zero_models import PARAMETERS, Decoder


class Any:
    """Every name is known."""

    def __contains__(self, name: object) -> bool:
        return True


ANY = Any()


def add(model: nn.Module) -> None:
    model.blocks[0].more = nn.Linear(2, 2)
    model.blocks[0].more.weight = model.head.weight
    del model.blocks[0].more.bias


def rename(model: nn.Module) -> None:
    held = model.blocks[0]._modules
    held["other"] = held.pop("norm")


def move(model: nn.Module) -> None:
    model.norm.again = model.blocks[0]._parameters.pop("again", model.norm.weight)


def exchange(model: nn.Module) -> None:
    one, other = model.blocks[0], model.blocks[1]
    one.norm, other.norm = other.norm, one.norm


def evaluate(model: nn.Module) -> None:
    model.blocks[1].eval()


def freeze(model: nn.Module) -> None:
    model.norm.weight.requires_grad_(False)


def drop(model: nn.Module) -> None:
    model.blocks[0].norm = None


def nothing(model: nn.Module) -> None:
    pass


CHANGES = (add, rename, move, exchange, evaluate, freeze, drop, nothing)


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(1, simulated=True)
def test_changes_are_found(change: Callable[[nn.Module], None]):
    torch.manual_seed(0)
    plan = Plan(parameters=PARAMETERS)
    model = parallelize(Decoder(blocks=2), make_mesh(device_type="cpu", tp=1), plan)
    walker = Walker(model, ANY)
    before = walker.walk()
    change(model)
    found, anew = walker.walk(), Walker(model, ANY).walk()
    assert list(found.named) == list(anew.named)
    assert all(one is other for one, other in zip(found.leaves, anew.leaves, strict=True))
    assert found.modes("cpu") == anew.modes("cpu")
    assert found.trained().parameters == anew.trained().parameters
    names = [name for name, _ in model.named_parameters()]
    assert list(found.named) == names
    assert found.training == tuple(one.training for one in model.modules())
    if change is nothing:
        assert found.named is before.named


@on_ranks(1, simulated=True)
def test_a_block_that_is_compiled_later():
    model = parallelize(Decoder(blocks=2), make_mesh(device_type="cpu", tp=1), Plan())
    walker = Walker(model, ANY)
    assert not walker.walk().is_compiled
    model.blocks[0].compile(backend="eager")
    assert walker.walk().is_compiled
