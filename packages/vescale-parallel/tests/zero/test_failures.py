"""After an error nothing stays gathered, and ranks that gather different units are told so."""

import gc
import weakref
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from vescale_comm import bound_waits
from vescale_comm.testing import Failed, outcomes, run
from vescale_dtensor import DTensor
from zero_models import Decoder, batch, distributed, make, require_same_gradients, schedule_of


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    torch.manual_seed(step)
    return model(*batch(step))


def raise_now(*_: Any) -> None:
    raise ZeroDivisionError


def in_hook_of_an_output(model: Decoder) -> None:
    handle = model.blocks[1].mlp.register_forward_hook(
        lambda m, args, output: output.register_hook(raise_now) and None
    )
    loss = loss_of(model)
    handle.remove()
    loss.backward()


def in_hook_of_a_parameter(model: Decoder) -> None:
    handle = model.blocks[1].mlp.down.weight.register_hook(raise_now)
    try:
        loss_of(model).backward()
    finally:
        handle.remove()


def in_an_op(model: Decoder) -> None:
    handle = model.blocks[2].norm.register_forward_hook(lambda m, args, out: Raises.apply(out))
    loss = loss_of(model)
    handle.remove()
    loss.backward()


def before_what_is_packed_is_reduced(model: Decoder) -> None:
    def hook(module: Any, *_: Any) -> None:
        packs = module.down.weight._local_tensor.grad_fn
        (reduces,) = [node for node, _ in packs.next_functions if node is not None]
        reduces.register_prehook(raise_now)

    handle = model.blocks[1].mlp.register_forward_hook(hook)
    loss = loss_of(model)
    handle.remove()
    try:
        loss.backward()
    finally:
        buffers = [one for unit in schedule_of(model).units for one in unit.buffers]
        assert all(one.unreduced is None for one in buffers)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


def of_a_written_parameter(model: Decoder) -> None:
    loss = loss_of(model)
    with torch.no_grad():
        model.blocks[0].mlp.down.weight.mul_(1)
    loss.backward()


def in_a_recomputation(model: Decoder) -> None:
    model.around = False
    calls = []

    def second(*_: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise ZeroDivisionError

    handle = model.blocks[1].mlp.register_forward_hook(second)
    loss = loss_of(model)
    try:
        loss.backward()
    finally:
        handle.remove()
        model.around = None


def in_the_forward(model: Decoder) -> None:
    handle = model.blocks[1].mlp.up.register_forward_hook(raise_now)
    try:
        loss_of(model)
    finally:
        handle.remove()


def in_a_hook_before_a_forward(model: Decoder) -> None:
    handle = model.blocks[1].register_forward_pre_hook(raise_now)
    try:
        loss_of(model)
    finally:
        handle.remove()


PLACES = [
    in_hook_of_an_output,
    in_hook_of_a_parameter,
    in_an_op,
    before_what_is_packed_is_reduced,
    of_a_written_parameter,
    in_a_recomputation,
    in_the_forward,
    in_a_hook_before_a_forward,
]


def raising(rank: int, world_size: int, index: int, sizes: dict[str, int], ahead: Any) -> None:
    plain, model = make(), distributed(make(), sizes, 3, prefetch=ahead)
    loss_of(model, 7).backward()
    model.zero_grad()
    schedule = schedule_of(model)
    gathered: list[Any] = []

    def note(module: nn.Module, *_: Any) -> None:
        for unit in schedule.units:
            wholes = [b.full for b in unit.buffers if b.full is not None]
            gathered.extend(weakref.ref(one.untyped_storage()) for one in wholes)

    for block in model.blocks:
        block.mlp.register_forward_hook(note)
    stored = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        PLACES[index](model)
    # Before anything else runs: no module holds a gathered parameter, and no buffer is alive.
    assert {name: id(p) for name, p in model.named_parameters()} == stored
    assert schedule.gathered_bytes == 0
    gc.collect()
    assert gathered
    assert not [one for one in gathered if one() is not None]
    for one in (plain, model):
        one.zero_grad()
        loss_of(one, 1).backward()
    require_same_gradients(model, plain)


@pytest.mark.parametrize("ahead", [0, "auto"])
@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("index", range(len(PLACES)), ids=lambda i: PLACES[i].__name__)
def test_nothing_stays_gathered_after_an_error(index: int, sizes: Any, ahead: Any):
    run(raising, 4, index, sizes, ahead)


def freed_within_a_step(rank: int, world_size: int) -> None:
    model = distributed(make(), {"dp": 2}, 3)
    handles = [register_optimizer_step_pre_hook(lambda *_: gc.collect() and None)]
    handles.append(register_optimizer_step_pre_hook(lambda *_: None))
    gone = weakref.ref(schedule_of(model))
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    gc.disable()  # it is the hook that frees the model
    del model
    optimizer.step()
    gc.enable()
    assert gone() is None
    for handle in handles:
        handle.remove()


def test_a_model_may_be_freed_while_an_optimizer_steps():
    run(freed_within_a_step, 2)


class Ordered(nn.Module):
    """Blocks of one size, called in an order that is set from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.order = [0, 1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x


def out_of_order(
    rank: int, world_size: int, sizes: dict[str, int], order: list[int], backward: bool
) -> None:
    torch.manual_seed(0)
    words: dict[str, Any] = {"parameters": {"*": "replicate"}, "activations": {}}
    model: Any = distributed(Ordered(), sizes, 3, prefetch=0, **words)
    # Who waits for a rank that has raised already is told when its wait ends.
    bound_waits(timeout=8, report_after=float("inf"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 64).reshape(8, 8)
    for step in range(8):
        if step == 4 and rank == world_size - 1:
            model.order = order
        assert step <= 4, "the ranks computed with each other's weights"
        loss = model(x).square().mean() if backward else None
        if loss is None:
            with torch.no_grad():
                model(x)
        else:
            loss.backward()
            # Replicas whose own ranks agree meet the others here.
            optimizer.step()


@pytest.mark.parametrize(
    ("sizes", "order", "backward"),
    [
        ({"dp": 2}, [0, 2, 1], True),
        ({"dp": 2}, [0, 1, 1], True),
        ({"dp": 2}, [0, 1], True),
        ({"dp": 2}, [0, 2, 1], False),
        ({"replica": 2, "dp": 2}, [0, 2, 1], True),
    ],
    ids=str,
)
def test_ranks_that_gather_in_another_order_later_are_told(sizes: Any, order: Any, backward: bool):
    found = outcomes(out_of_order, prod(sizes.values()), sizes, order, backward)
    for one in found:
        assert isinstance(one, Failed), one
        assert one.type_name == "CommMismatchError", one
        assert "the ranks have diverged" in one.message
        # Where the difference flows into something else that is compared, that may tell first.
        assert "gathers unit 'layers." in one.message or order == [0, 1] or len(sizes) > 1


def counted(rank: int, world_size: int) -> int:
    """Alternating between two orders, on all ranks alike, is no difference."""
    torch.manual_seed(0)
    words: dict[str, Any] = {"parameters": {"*": "replicate"}, "activations": {}}
    model: Any = distributed(Ordered(), {"dp": world_size}, 3, **words)
    x = torch.linspace(-1, 1, 64).reshape(8, 8)
    for step in range(6):
        model.order = [0, 1, 2] if step % 2 else [2, 0, 1]
        model(x).square().mean().backward()
    assert isinstance(model.layers[0].weight, DTensor)
    return schedule_of(model).gathered_bytes


def test_another_order_on_all_ranks_is_right():
    assert run(counted, 4) == [0] * 4
