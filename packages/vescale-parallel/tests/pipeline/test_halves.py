"""A backward in two halves has the gradients of a whole one, and computes each product once."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage_runs import accumulate, batch, make, plan, require_gradients
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_parallel import Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel._pipeline.run.backward_cut import cut_of, walk
from vescale_parallel._pipeline.run.halves import Halves

PRODUCTS = ("mm", "addmm", "bmm", "convolution_backward", "_scaled_dot_product")


class Counted(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum(n for name, n in self.calls.items() if name.startswith(PRODUCTS))


def layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0, **options)


def counted(count: int, shared: bool) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    blocks = [layer() for _ in range(count)]
    model = nn.Sequential(*blocks, *([blocks[0]] if shared else []))
    return model, torch.randn(3, 5, 8, requires_grad=True), torch.randn(3, 5, 8)


@pytest.mark.parametrize(("count", "shared"), [(1, False), (3, False), (2, True)])
def test_each_product_is_computed_once(count: int, shared: bool):
    model, x, gradient = counted(count, shared)
    output = model(x)
    with Counted() as whole:
        output.backward(gradient)
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    output = model(x)
    with Counted() as first:
        halves = Halves([output], [gradient], [x])
        (found,) = halves.inputs()
    assert found is not None
    assert torch.equal(found, x.grad)
    with Counted() as second:
        halves.weights()
    for mine, theirs in zip([p.grad for p in model.parameters()], expected, strict=True):
        assert torch.equal(mine, theirs)
    assert first.products + second.products == whole.products
    # A block that runs twice gets its gradients with those of the input.
    split = count - shared
    assert second.products == 4 * split


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # Between the products of q and k and their meeting are more nodes than beside v.
        mixed = (self.q(x).sin() @ self.k(x).cos().neg().transpose(-1, -2)) @ self.v(x)
        return x + self.o(mixed)


def test_parameters_that_do_not_lead_to_each_other_share_a_run():
    x = torch.randn(2, 3, 4, requires_grad=True)
    _, shape = walk([get_gradient_edge(Attention()(x))], [get_gradient_edge(x)])
    found = cut_of(shape)
    assert [len(one.ends) for one in found.rounds] == [1, 3]
    assert not found.is_whole


def test_graphs_of_one_shape_are_cut_once():
    block = Attention()
    before = cut_of.cache_info()
    for _ in range(3):
        x = torch.randn(2, 3, 4, requires_grad=True)
        output = block(block(x))
        Halves([output], [torch.ones_like(output)], [x]).inputs()
    after = cut_of.cache_info()
    assert after.misses == before.misses + 1
    assert after.hits == before.hits + 2


def test_checkpoints_are_computed_again_in_each_half():
    model, x, gradient = counted(2, False)
    model(x).backward(gradient)
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    output = x
    for block in model:
        output = checkpoint(block, output, use_reentrant=False)
    halves = Halves([output], [gradient], [x])
    halves.inputs()
    halves.weights()
    for mine, theirs in zip([p.grad for p in model.parameters()], expected, strict=True):
        assert torch.equal(mine, theirs)


def test_schedules_of_halves_compute_no_product_more():
    def on_a_rank(rank: int, world_size: int, schedule: str) -> int:
        model = make()
        parallelize(model, make_mesh(device_type="cpu", pp=2), plan(schedule, 2))
        forward_backward(model, *batch(0))  # tried
        with Counted() as counted:
            forward_backward(model, *batch(1))
        return counted.products

    assert simulate(2)(on_a_rank, "zb-h1") == simulate(2)(on_a_rank, "1f1b")


class Turned(nn.Module):
    """A block that hands on views of its output; how many kernels it takes depends on the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.part = nn.Linear(6, 6), nn.Linear(3, 6)

    def forward(self, given: Any) -> Any:
        x, half, turned = given
        # Of turned views one with a row, or none, is contiguous, and one with more is not.
        y = self.all(x + self.part(half) + self.all(turned.transpose(1, 2))).tanh()
        return y, y[..., :3], y.transpose(1, 2)


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Turned() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        given: Any = x, x[..., :3], x.transpose(1, 2)
        for block in self.blocks:
            given = block(given)
        return given[0].square().mean()


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
@on_ranks(4, simulated=True)
def test_ranks_without_rows_gather_what_others_gather(schedule: str, zero: int):
    """Of 7 rows the last microbatch has one, so one of two ranks has other kernels in its graph."""
    plain, model = Turns(), Turns()
    how = Plan(pipeline=schedule, microbatches=4, zero=zero)
    parallelize(model, make_mesh(device_type="cpu", pp=2, dp=2), how)
    for step in range(2):
        x = torch.randn(7, 5, 6, generator=torch.Generator().manual_seed(step))
        accumulate(plain, 4, x)
        forward_backward(model, x)
    require_gradients(model, plain)


def test_microbatches_copy_no_gradients():
    """The gradients of a stage of one rank are added up in place, as they come."""

    def on_a_rank(rank: int, world_size: int, schedule: str, count: int) -> int:
        model = make()
        parallelize(model, make_mesh(device_type="cpu", pp=2), plan(schedule, count))
        forward_backward(model, *batch(0))  # tried
        with Counted() as counted:
            forward_backward(model, *batch(1))
        return counted.calls["copy_"] + counted.calls["clone"]

    for schedule in ("1f1b", "zb-h1"):
        few, many = (simulate(2)(on_a_rank, schedule, count) for count in (2, 4))
        for less, more in zip(few, many, strict=True):
            # Two microbatches more: of messages and activations, and of none of a dozen gradients.
            assert more - less <= 2 * 3


def program(seed: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """A random graph: outputs, what was received, and parameters; of the same seed the same."""
    draw, fill = random.Random(seed), torch.Generator().manual_seed(seed)

    def leaf() -> Tensor:
        made = torch.randn(3, 3, generator=fill, dtype=torch.float64)
        return made.requires_grad_(draw.random() < 0.9)

    received = [leaf() for _ in range(draw.randint(0, 2))]
    weights = [leaf() for _ in range(draw.randint(1, 4))]
    values = [*received, *weights]
    for _ in range(draw.randint(3, 14)):
        a, b = draw.choice(values[-6:]), draw.choice([*weights, *values])
        kind = draw.choice(["mm", "mul", "add", "t", "split", "norm", "use"])
        if kind == "split":
            values += (a @ b).split([1, 2])[1].expand(3, 2, 3).unbind(1)
        else:
            values.append(
                {
                    "mm": lambda a=a, b=b: a @ b * 0.5,
                    "mul": lambda a=a, b=b: a * b,
                    "add": lambda a=a, b=b: a + b,
                    "t": lambda a=a: a.t().tanh(),
                    "norm": lambda a=a, b=b: nn.functional.layer_norm(a, (3,), b[0]),
                    "use": lambda a=a, b=b: nn.functional.linear(a, b, b[1]).sin(),
                }[kind]()
            )
    made = [one for one in values if one.requires_grad]
    outputs = draw.sample(made, min(len(made), draw.randint(1, 3)))
    return outputs, [one for one in received if one.requires_grad], weights


def used_twice() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """An output beside the path, and another one that is computed from it."""
    received, weight = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    beside = weight * 3
    return [beside, beside * received], [received], [weight]


def test_an_output_from_which_another_is_computed():
    compare_halves(used_twice)


@pytest.mark.parametrize("seed", range(200))
def test_random_graphs(seed: int):
    compare_halves(lambda: program(seed))


def compare_halves(program: Callable[[], tuple[list[Tensor], list[Tensor], list[Tensor]]]) -> None:
    """The gradients of both halves are those of one backward."""
    outputs, received, weights = program()
    if not outputs:
        return
    starts = [torch.full_like(one, 0.5) for one in outputs]
    torch.autograd.backward(outputs, starts)
    expected = [one.grad for one in (*received, *weights)]
    outputs, received, weights = program()
    halves = Halves(outputs, starts, received)
    found = halves.inputs()
    assert all(one.grad is None for one in weights)
    halves.weights()
    for mine, theirs in zip([*found, *(w.grad for w in weights)], expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
