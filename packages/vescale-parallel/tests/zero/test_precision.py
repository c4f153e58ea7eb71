"""A plan's dtypes are those of one device that casts alike, and what is sent is cast before."""

from collections.abc import Mapping
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vescale_comm import simulate, trace
from vescale_comm.testing import run
from vescale_dtensor import DTensor
from vescale_parallel import Plan, no_sync
from zero_models import (
    adamw,
    batch,
    distributed,
    make,
    require_same_values,
    schedule_of,
    train,
    train_scaled,
    whole,
)

BF16 = {"compute": "bfloat16"}
MIXED = {"compute": "bfloat16", "reduce": "float32"}
BY_RULE = {
    "{embed,head}*": {"compute": "float32"},
    "*.down.weight": {"compute": "float16", "reduce": "bfloat16"},
    "*": MIXED,
}


class Net(nn.Module):
    """Layers that cast what they are given, without dropout: exact also on shards of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens).float()
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.to(self.head.weight.dtype)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x.to(self.up.weight.dtype))) * self.gain
        return x + self.down(hidden.to(self.down.weight.dtype)).float()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


WORDS: dict[str, Any] = {"parameters": {"*": "replicate"}, "activations": {}}


def dtypes_of(words: Mapping[str, Any], name: str) -> tuple[torch.dtype, torch.dtype]:
    """Compute and reduction dtype, read again here: the names of the rules are few."""
    if "compute" not in words:
        key = "{embed,head}*" if name.startswith(("embed", "head")) else "*"
        words = words["*.down.weight" if name.endswith("down.weight") else key]
    compute = getattr(torch, words["compute"])
    return compute, getattr(torch, words.get("reduce", words["compute"]))


def one_device(model: nn.Module, words: Any, shards: int, step: int) -> Tensor:
    """A step's loss and gradients on one device, with the casts that `shards` ranks make."""
    losses, totals = [], {}
    tokens, targets = batch(step)
    for rows, wanted in zip(tokens.chunk(shards), targets.chunk(shards), strict=True):
        cast = {
            name: one.detach().to(dtypes_of(words, name)[0]).requires_grad_()
            for name, one in model.named_parameters()
        }
        loss = torch.func.functional_call(model, cast, (rows, wanted))
        loss.backward()
        losses.append(loss.detach())
        for name, one in cast.items():
            scalar = not one.ndim  # is not sharded: summed as it is stored
            sent = torch.float32 if scalar else dtypes_of(words, name)[1]
            totals.setdefault(name, []).append(one.grad.to(sent))
    for name, parameter in model.named_parameters():
        sent = totals[name][0].dtype
        # Halves are added in float32 and rounded once.
        parameter.grad = sum(g.float() for g in totals[name]).to(sent).float()
    return sum(losses)


def steps(rank: int, world_size: int, zero: int, words: Any) -> None:
    plain, model = net(), distributed(net(), {"dp": world_size}, zero, precision=words, **WORDS)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.002) for one in (plain, model)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = one_device(plain, words, world_size, step)
        loss = model(*batch(step))
        loss.backward()
        torch.testing.assert_close(loss.full_tensor(), expected, rtol=1e-6, atol=0)
        for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert one.dtype == one.grad.dtype == torch.float32
            torch.testing.assert_close(
                whole(one.grad), two.grad, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
        for optimizer in optimizers:
            optimizer.step()
    require_same_values(model, plain, rtol=1e-6, atol=1e-7)
    assert schedule_of(model).gathered_bytes == 0


@pytest.mark.parametrize("words", [BF16, MIXED, BY_RULE], ids=["bf16", "mixed", "by_rule"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_it_is_one_device_with_the_same_casts(zero: int, words: Any):
    run(steps, 4, zero, words)


def unsharded(rank: int, world_size: int) -> None:
    # With this rule gradients are summed in the dtype in which they are stored, as at level 0.
    steps(rank, world_size, 0, MIXED)


@pytest.mark.parametrize("ranks", [1, 4])
def test_level_0_computes_in_the_dtype_too(ranks: int):
    run(unsharded, ranks)


def exact(rank: int, world_size: int, sizes: dict[str, int], zero: int) -> None:
    words = {"compute": "float32", "reduce": "float32", "master": "float32", "buffers": "float32"}
    models = [distributed(make(), sizes, zero), distributed(make(), sizes, zero, precision=words)]
    one, two = (train(model, 3) for model in models)
    assert one == two
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(whole(a.detach()), whole(b.detach()))


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_float32_said_is_float32_unsaid(sizes: dict[str, int], zero: int):
    run(exact, prod(sizes.values()), sizes, zero)


TENSOR_PARALLEL_BOUND = 2.0**-7
"""Partial sums over `tp` are rounded to bfloat16 (an error of 2**-9 each) before they are added."""


def with_tp(rank: int, world_size: int, sizes: dict[str, int], zero: int) -> None:
    def one() -> Any:
        model = make()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    plain, model = one(), distributed(one(), sizes, zero, precision=MIXED)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (plain, model)]
    for step in range(5):
        cast = {name: p.to(torch.bfloat16) for name, p in plain.named_parameters()}
        expected = torch.func.functional_call(plain, cast, batch(step))
        loss = model(*batch(step))
        assert loss.dtype == torch.bfloat16
        torch.testing.assert_close(
            loss.float().full_tensor(), expected.float(), rtol=TENSOR_PARALLEL_BOUND, atol=0
        )
        for each, optimizer in zip((expected, loss), optimizers, strict=True):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"replica": 2, "dp": 2}], ids=str)
def test_losses_within_a_bound_where_sums_are_rounded(sizes: dict[str, int], zero: int):
    run(with_tp, 4, sizes, zero)


def wire(rank: int, world_size: int, zero: int, words: Any, sizes: tuple[int, int]) -> None:
    model = distributed(make(), {"dp": world_size}, zero, precision=words)
    report = Plan(parameters={"*": "replicate"}, activations={}, zero=zero, precision=words).check(
        make(), {"dp": world_size}
    )
    with trace() as seen:
        for step in range(2):
            with no_sync(model):
                model(*batch(step)).backward()
        model(*batch(2)).backward()
    elements = sum(row.plan.largest for row in report.buffers) * (world_size - 1)
    root = sum(row.plan.largest for row in report.buffers if not row.unit) * (world_size - 1)
    sent = {
        op: sum(r.bytes for r in seen.records if r.op == op and r.axes == ("dp",))
        for op in ("all_gather", "reduce_scatter")
    }
    # At level 3 the root once and each block twice, in each of three microbatches; the last block,
    # with which backward begins, once when that is known.
    last = report.buffers[-1].plan.largest * (world_size - 1)
    gathered = 3 * (2 * elements - root) - 2 * last if zero == 3 else elements
    assert sent == {"all_gather": gathered * sizes[0], "reduce_scatter": elements * sizes[1]}
    assert sum(row.gather_bytes for row in report.buffers) == elements * sizes[0]
    assert sum(row.reduce_bytes for row in report.buffers) == elements * sizes[1]
    for unit in schedule_of(model).units:
        for buffer in unit.buffers:
            held = {
                t.untyped_storage().data_ptr(): t
                for t in (buffer.shard, buffer.full)
                if t is not None
            }
            assert (
                sum(t.untyped_storage().nbytes() for t in held.values()) == buffer.row.stored_bytes
            )


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize(
    ("words", "sizes"),
    [(None, (4, 4)), (BF16, (2, 2)), (MIXED, (2, 4)), ({"reduce": "bfloat16"}, (4, 2))],
    ids=str,
)
def test_what_is_sent_is_cast_before(zero: int, words: Any, sizes: tuple[int, int]):
    run(wire, 4, zero, words, sizes)


def masters(rank: int, world_size: int, zero: int) -> None:
    """A model that was built in half precision computes in it, and is stepped in float32."""
    model = distributed(make().bfloat16(), {"dp": 4}, zero, precision={"master": "float32"})
    optimizer = adamw(model.parameters())
    seen = []
    for one in model.blocks:
        one.mlp.up.register_forward_hook(lambda m, a, out: seen.append((m.weight.dtype, out.dtype)))
    before = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    model(*batch(0)).backward()
    optimizer.step()
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32
        assert torch.equal(before[name], before[name].bfloat16().float())
    # A step of 1e-2 * 1e-2 would be lost in half of these.
    moved = whole(model.blocks[0].mlp.up.weight.detach())
    assert not torch.equal(moved, moved.bfloat16().float())


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_masters_in_another_dtype_than_the_model(zero: int):
    run(masters, 4, zero)


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("scale", torch.linspace(0, 1, 4))
        self.register_buffer("count", torch.tensor([3]))
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x * self.scale.to(x.dtype)) * self.count


def buffers(rank: int, world_size: int) -> None:
    words = {"mean": {}, "*": BF16 | {"buffers": "bfloat16"}}
    torch.manual_seed(0)
    given = WithBuffers()
    scale = given.scale
    model: Any = distributed(given, {"dp": 2}, 3, precision=words, **WORDS)
    assert [model.scale.dtype, model.count.dtype, model.mean.dtype] == [
        *(torch.bfloat16, torch.int64, torch.float32)
    ]
    assert model.scale is scale
    assert model(torch.ones(4, 4).bfloat16()).dtype == torch.bfloat16


def test_buffers_by_rule():
    run(buffers, 2)


def test_explain_tells_dtypes_memory_and_traffic():
    plan = Plan(parameters={"*": "replicate"}, zero={"embed*": 0, "*": 3}, precision=MIXED)
    text = str(plan.check(make(tied=False), {"dp": 4}))
    assert "float32, computes in bfloat16" in text
    assert "float32, gathered as bfloat16, reduced in float32" in text
    assert "all-gather  reduce-scatter" in text
    assert "summed in the dtype" not in text  # it is that of the rule
    plan = Plan(parameters={"*": "replicate"}, zero={"embed*": 0, "*": 3}, precision=BF16)
    text = str(plan.check(make(tied=False), {"dp": 4}))
    assert "summed in the dtype in which they are stored: 'embed.weight'" in text
    report = Plan(parameters={"*": "replicate"}, zero=3, precision=MIXED).check(make(), {"dp": 4})
    (row,) = [row for row in report.buffers if row.unit == "blocks.0"]
    assert row.gather_bytes * 2 == row.reduce_bytes
    assert row.stored_bytes == row.shard_bytes


def scaled(rank: int, world_size: int) -> None:
    """float16 with a loss scale: an overflow skips the step on every rank, the next one is made."""
    model = distributed(net(), {"dp": 4}, 3, precision={"compute": "float16"}, **WORDS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start = whole(model.head.weight.detach()).clone()
    scales = train_scaled(model, scaler, optimizer, 40)
    assert scales[0] == 2.0**39
    assert scales[-1] == scales[-2] >= 1
    moved = whole(model.head.weight.detach())
    assert moved.isfinite().all()
    assert not torch.equal(moved, start)
    assert isinstance(model.head.weight.grad, DTensor)


def test_float16_with_a_grad_scaler():
    run(scaled, 4)


@pytest.mark.parametrize("words", [{}, {"precision": MIXED}], ids=["double", "cast"])
def test_a_forward_in_inference_mode_comes_before_training(words: dict[str, Any]):
    def on_a_rank(rank: int, world_size: int) -> None:
        model = distributed(make(), {"dp": 2}, 2, **words)
        # What is gathered is made anew then, and kept for the forwards that train.
        model = model if words else model.double()
        with torch.inference_mode():
            model(*batch(0))
        train(model, 1)

    simulate(2)(on_a_rank)
