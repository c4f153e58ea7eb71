"""What torch promises of parameters holds of sharded ones: each case runs beside one device."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from vescale_comm.testing import Failed, outcomes, run
from vescale_dtensor import CaptureError, DTensor, MeshError, Partial, capture
from vescale_parallel import ParallelError, StaleParameterError, no_sync
from zero_models import (
    Decoder,
    backward,
    batch,
    distributed,
    gradients,
    make,
    require_same_gradients,
    require_same_values,
    schedule_of,
    train,
    whole,
)

SIZES = [{"dp": 4}, {"dp": 2, "tp": 2}, {"replica": 2, "dp": 2}]


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    torch.manual_seed(step)
    return model(*batch(step))


def accumulation(model: nn.Module) -> None:
    for step in range(3):
        (loss_of(model, step) / 3).backward()


def forwards_before_a_backward(model: nn.Module) -> None:
    one, two = loss_of(model, 0), loss_of(model, 1)
    (one + 2 * two).backward()


def backwards_in_the_order_of_forwards(model: nn.Module) -> None:
    losses = [loss_of(model, step) for step in range(3)]
    for loss in losses:
        loss.backward()


def retained_graph(model: nn.Module) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()


def frozen_parameter(model: Decoder) -> None:
    model.blocks[1].mlp.up.weight.requires_grad_(False)
    backward(model)


def frozen_unit_later_unfrozen(model: Decoder) -> None:
    model.blocks[1].requires_grad_(False)
    backward(model)
    model.blocks[1].requires_grad_(True)
    backward(model, 1)


def everything_frozen_but_one(model: Decoder) -> None:
    model.requires_grad_(False)
    model.blocks[0].norm.weight.requires_grad_(True)
    backward(model)


def skipped_block(model: Decoder) -> None:
    skipped = model.blocks[1]
    model.blocks[1] = nn.Identity()
    backward(model)
    model.blocks[1] = skipped


def block_used_twice(model: Decoder) -> None:
    kept = model.blocks[2]
    model.blocks[2] = model.blocks[0]
    backward(model)
    model.blocks[2] = kept


def evaluation_between(model: Decoder) -> None:
    loss = loss_of(model)
    with torch.no_grad():
        loss_of(model.eval(), 1)
    model.train()
    loss.backward()


def forward_without_backward(model: Decoder) -> None:
    backward(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 2)


def write_without_a_count(model: Decoder) -> None:
    backward(model)
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
        parameter.grad = None
    backward(model, 1)


def data_assigned(model: Decoder) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    backward(model)


def gradients_set_to_zeros(model: Decoder) -> None:
    backward(model)
    model.zero_grad(set_to_none=False)
    backward(model, 1)


def module_called_alone(model: Decoder) -> None:
    x = torch.linspace(-1, 1, 40).reshape(5, 8)
    if isinstance(model.embed.weight, DTensor):
        mesh = schedule_of(model).root.mesh
        x = DTensor.from_local(x, mesh)
    torch.manual_seed(0)
    model.blocks[0](x).square().sum().backward()


def kept_activation(model: Decoder) -> None:
    kept = []
    handle = model.blocks[0].mlp.up.register_forward_hook(lambda m, a, out: kept.append(out))
    loss = loss_of(model)
    handle.remove()
    (loss + kept[0].square().mean()).backward()


def weight_used_in_the_loss(model: Decoder) -> None:
    kept = []

    def keep(module: nn.Linear, args: Any, output: Any) -> None:
        kept.append(module.weight.square().sum())

    handle = model.blocks[0].mlp.up.register_forward_hook(keep)
    loss = loss_of(model)
    handle.remove()
    (loss + 0.1 * kept[0]).backward()


def stored_parameter_in_the_loss(model: Decoder) -> None:
    loss = loss_of(model)
    (loss + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()


def hooks_of_a_stored_parameter(model: Decoder) -> None:
    seen = []
    parameter = model.blocks[1].mlp.down.weight
    parameter.register_hook(lambda g: g * 2)
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p is parameter))
    backward(model)
    assert seen == [True]


def gradient_inside_of_the_forward(model: Decoder) -> None:
    def penalty(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(
            output.square().sum(), args[0], retain_graph=True, create_graph=True
        )
        return output + 0.1 * slope

    handle = model.blocks[1].mlp.register_forward_hook(penalty)
    backward(model)
    handle.remove()


CASES: list[Callable[[Any], Any]] = [
    backward,
    accumulation,
    forwards_before_a_backward,
    backwards_in_the_order_of_forwards,
    retained_graph,
    frozen_parameter,
    frozen_unit_later_unfrozen,
    everything_frozen_but_one,
    skipped_block,
    block_used_twice,
    evaluation_between,
    forward_without_backward,
    write_without_a_count,
    data_assigned,
    gradients_set_to_zeros,
    module_called_alone,
    kept_activation,
    weight_used_in_the_loss,
    hooks_of_a_stored_parameter,
    gradient_inside_of_the_forward,
]


def both(rank: int, world_size: int, index: int, sizes: dict[str, int], zero: int) -> None:
    case = CASES[index]
    plain, model = make(), distributed(make(), sizes, zero)
    # A step before, so that what is gathered ahead follows an order that was learned.
    for one in (plain, model):
        backward(one, 7)
        one.zero_grad()
        case(one)
    require_same_gradients(model, plain)
    schedule = schedule_of(model)
    assert not any(unit.is_swapped or unit.depth for unit in schedule.units)
    expected = {name: id(p) for name, p in model.named_parameters()}
    backward(model, 8)
    assert {name: id(p) for name, p in model.named_parameters()} == expected
    assert schedule.gathered_bytes == 0


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: CASES[i].__name__)
@pytest.mark.parametrize(
    ("sizes", "zero"), [(SIZES[0], 3), (SIZES[1], 3), (SIZES[2], 3), (SIZES[1], 2)], ids=str
)
def test_as_one_device(index: int, sizes: dict[str, int], zero: int):
    run(both, 4, index, sizes, zero)


def penalty(rank: int, world_size: int, sizes: dict[str, int]) -> None:
    plain, model = make(), distributed(make(), sizes, 3)
    if "tp" in sizes:
        with pytest.raises(MeshError, match="mesh"):
            stored_parameter_in_the_loss(model)
        # By itself it is right: an own backward adds to the same gradients.
        backward(model)
        (0.1 * sum(p.square().sum() for p in model.parameters())).backward()
    else:
        stored_parameter_in_the_loss(model)
    stored_parameter_in_the_loss(plain)
    require_same_gradients(model, plain)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_stored_parameters_in_the_loss(sizes: dict[str, int]):
    run(penalty, 4, sizes)


def captured(rank: int, world_size: int) -> None:
    model = distributed(make(), {"dp": 2}, 3)
    tokens, targets = batch(0)
    with pytest.raises(CaptureError):
        capture(model)(tokens, targets)
    backward(model)


def test_capture_of_gathered_parameters_is_refused():
    run(captured, 2)


def by_autograd_grad(rank: int, world_size: int, sizes: dict[str, int]) -> None:
    plain, model = make(), distributed(make(), sizes, 3)
    expected = torch.autograd.grad(loss_of(plain), list(plain.parameters()))
    found = torch.autograd.grad(loss_of(model), list(model.parameters()))
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(whole(one), two, rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in model.parameters())
    for one in (plain, model):
        backward(one, inputs=[one.blocks[1].mlp.up.weight])
    require_same_gradients(model, plain)
    assert sum(g is not None for g in gradients(model).values()) == 1
    assert schedule_of(model).gathered_bytes == 0


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_autograd_grad_and_backward_of_inputs(sizes: dict[str, int]):
    run(by_autograd_grad, 4, sizes)


def recurrent(rank: int, world_size: int, sizes: dict[str, int]) -> None:
    def one() -> nn.Module:
        torch.manual_seed(0)
        return nn.LSTM(4, 6, num_layers=2, batch_first=True)

    words = {"parameters": {"*": "replicate"}, "activations": {}}
    plain, model = one(), distributed(one(), sizes, 3, **words)
    x = torch.linspace(-1, 1, 7 * 3 * 4).reshape(7, 3, 4)
    for each in (plain, model):
        for _ in range(2):
            each(x)[0].square().mean().backward()
    require_same_gradients(model, plain)
    assert model._flat_weights[0] is model.weight_ih_l0


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_module_that_lists_its_weights(sizes: dict[str, int]):
    run(recurrent, 4, sizes)


def states(rank: int, world_size: int, sizes: dict[str, int], zero: int) -> None:
    plain, model = make(), distributed(make(seed=5), sizes, zero)
    full = plain.state_dict()
    assert list(model.state_dict()) == list(full)
    assert {n: v.shape for n, v in model.state_dict().items()} == {
        n: v.shape for n, v in full.items()
    }
    loss_of(model)  # what is gathered by now must not survive the load
    model.load_state_dict(full)
    require_same_values(model, plain, rtol=0, atol=0)
    torch.testing.assert_close(train(model, 2), train(plain, 2), rtol=1e-5, atol=1e-6)
    other = distributed(make(seed=6), sizes, zero)
    other.load_state_dict(model.state_dict())
    require_same_values(other, plain, rtol=1e-4, atol=1e-6)
    other.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(StaleParameterError, match=r"'embed\.weight' was replaced"):
        loss_of(other)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_state_dict_has_ordinary_names_and_global_shapes(sizes: dict[str, int], zero: int):
    run(states, 4, sizes, zero)


def copies(rank: int, world_size: int, sizes: dict[str, int], zero: int) -> None:
    plain, model = make(), distributed(make(), sizes, zero)
    train(plain, 1)
    train(model, 1)
    other = copy.deepcopy(model)
    frozen = copy.deepcopy(plain)
    torch.testing.assert_close(train(model, 2), train(plain, 2), rtol=1e-5, atol=1e-6)
    require_same_values(other, frozen, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(train(other, 2), train(frozen, 2), rtol=1e-5, atol=1e-6)
    require_same_values(model, plain, rtol=1e-4, atol=2e-5)
    with torch.no_grad():  # an average of weights, as EMA keeps it
        for one, two in ((other, model), (frozen, plain)):
            for a, b in zip(one.parameters(), two.parameters(), strict=True):
                a.lerp_(b, 0.3)
            loss = loss_of(one.eval())
            assert loss.isfinite()
    require_same_values(other, frozen, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_deep_copies_train_apart(sizes: dict[str, int], zero: int):
    run(copies, 4, sizes, zero)


def other_dtype(rank: int, world_size: int, sizes: dict[str, int]) -> None:
    plain, model = make().double(), distributed(make(), sizes, 3).double()
    torch.testing.assert_close(train(model, 2), train(plain, 2), rtol=1e-9, atol=0)
    model.blocks[0].mlp.up.float()
    with pytest.raises(ParallelError, match="have several dtypes now"):
        loss_of(model)


@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_model_to_another_dtype(sizes: dict[str, int]):
    run(other_dtype, 4, sizes)


def written_between(rank: int, world_size: int, zero: int) -> None:
    for one in (make(), distributed(make(), {"dp": 2, "tp": 2}, zero)):
        loss = loss_of(one)
        with torch.no_grad():
            one.blocks[0].mlp.down.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        backward(one)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_parameter_written_between_forward_and_backward_is_refused(zero: int):
    run(written_between, 4, zero)


def recorded(rank: int, world_size: int) -> None:
    model = distributed(make(), {"dp": 4}, 3)
    with pytest.raises(ParallelError, match="create_graph=True"):
        torch.autograd.grad(loss_of(model), list(model.parameters()), create_graph=True)
    backward(model)


def test_gradients_of_gradients_are_refused_by_name():
    run(recorded, 4)


def once(rank: int, world_size: int, sizes: dict[str, int], zero: int) -> None:
    plain, model = make(), distributed(make(), sizes, zero)
    accumulation(plain)
    with no_sync(model):
        backward_scaled(model, 0)
        backward_scaled(model, 1)
        # Not reduced, and not hidden: partial sums over dp.
        assert all(p.grad.placements[-1] == Partial("sum") for p in model.parameters())
    backward_scaled(model, 2)
    require_same_gradients(model, plain)
    # The last microbatch leaves out a block: what was kept of it is reduced all the same.
    for one in (plain, model):
        one.zero_grad()
    backward_scaled(plain, 0)
    with no_sync(model):
        backward_scaled(model, 0)
    for one in (plain, model):
        skipped_block(one)
    require_same_gradients(model, plain)


def backward_scaled(model: nn.Module, step: int) -> None:
    (loss_of(model, step) / 3).backward()


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_no_sync_reduces_once(sizes: dict[str, int], zero: int):
    run(once, 4, sizes, zero)


def branching(rank: int, world_size: int, skipped: int) -> None:
    model = distributed(make(), {"dp": 4}, 3)
    if rank == 2:
        model.blocks[skipped] = nn.Identity()
    loss_of(model)


@pytest.mark.parametrize("skipped", [0, 1])
def test_ranks_that_skip_another_unit_are_told(skipped: int):
    for one in outcomes(branching, 4, skipped):
        assert isinstance(one, Failed)
        assert one.type_name == "CommMismatchError"
        assert f"ranks 0, 1, 3: gathers unit 'blocks.{skipped}'" in one.message
        assert f"rank 2: gathers unit 'blocks.{skipped + 1}'" in one.message
