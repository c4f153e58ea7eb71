"""`torch.compile` of a parallelised model replays captured forwards: eager mode's bits, no graph.

A warning says so. What users type is tried: the model, its blocks, a function around it, the method
`compile`. The compiler's backend must not be given a single operation, and every unit must have
been replayed.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from vescale_comm.testing import run
from vescale_parallel import captured_units, mesh, parallelize
from zero_models import adamw, batch, gradients, make, plan_for, same

STEPS, SIZES = 4, {"dp": 2}
Call = Callable[..., Tensor]


class Backend:
    """A backend of torch.compile that runs what it is given, and counts the operations."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Call:
        self.operations += [str(one.target) for one in graph.graph.nodes if "call" in one.op]
        return graph.forward


def the_model(model: nn.Module, backend: Backend) -> Call:
    return torch.compile(model, backend=backend)


def its_method(model: nn.Module, backend: Backend) -> Call:
    model.compile(backend=backend)
    return model


def each_block(model: nn.Module, backend: Backend) -> Call:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def around_it(model: nn.Module, backend: Backend) -> Call:
    return torch.compile(lambda *given: model(*given), backend=backend)


def a_copy(model: nn.Module, backend: Backend) -> Call:
    """The copy is trained as its own, whatever was compiled before."""
    return torch.compile(copy.deepcopy(model), backend=backend)


def train(model: nn.Module, call: Call) -> list[Any]:
    optimizer, found = adamw(model.parameters()), []
    for seed in range(STEPS):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        loss = call(*batch(seed))
        loss.backward()
        found += [loss.detach(), *(one.clone() for one in gradients(model).values())]
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found.append(call(*batch(seed)))
        model.train()
    return [*found, *(one.detach() for one in model.parameters()), torch.get_rng_state()]


def compare(
    rank: int, world_size: int, how: Any, zero: int, words: dict[str, Any], blocks: int = 2
) -> Any:
    torch.compiler.reset()  # it looks at eight modules of a kind, and workers serve many cases
    over = mesh(device_type="cpu", **SIZES)
    static = words.pop("static", False)
    plan = plan_for(SIZES, zero, **words)
    eager, other = (
        parallelize(make(blocks=blocks), over, plan, static=one) for one in (False, static)
    )
    backend = Backend()
    call = how(other, backend)
    trained = getattr(call, "_orig_mod", other)
    expected = train(eager, eager)
    # A static model has said that it replays.
    told = pytest.warns(UserWarning, match="captures forwards and replays them: .* given nothing")
    with nullcontext() if static else told:
        found = train(trained, call)
    same(expected, found)
    assert not captured_units(eager)
    return {one.name: one.replays for one in captured_units(trained)}, backend.operations


@pytest.mark.parametrize(
    ("how", "zero"), [(the_model, 0), (the_model, 3), (its_method, 0), (around_it, 3), (a_copy, 3)]
)
def test_a_compiled_model_replays(how: Any, zero: int):
    for replays, operations in run(compare, 2, how, zero, {}):
        expected = {"blocks.0", "blocks.1"} if zero else {""}
        assert {name for name, number in replays.items() if number >= STEPS} == expected
        assert not operations


def test_compiled_blocks_replay():
    for replays, operations in run(compare, 2, each_block, 3, {}, 10):
        assert set(replays) >= {f"blocks.{at}" for at in range(10)}
        assert all(number >= STEPS for name, number in replays.items() if name)
        assert not operations


@pytest.mark.parametrize("words", [{"static": True}, {"checkpoint": "full"}], ids=str)
def test_beside_other_words(words: dict[str, Any]):
    for replays, operations in run(compare, 2, the_model, 3, words):
        assert all(number >= STEPS for name, number in replays.items() if name)
        assert not operations
