"""What a plan recomputes has the bits of what it keeps: losses, gradients, generators, buffers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import vescale_comm
import vescale_dtensor
from torch import Tensor, nn
from vescale_parallel import ParallelError, Plan, parallelize
from vescale_parallel import mesh as make_mesh
from zero_models import batch, distributed, make, whole


def step(model: nn.Module, *inputs: Tensor) -> tuple[Any, ...]:
    """Loss, gradients, buffers and the generator's state after a step."""
    torch.manual_seed(5)
    loss = model(*inputs)
    loss.backward()
    gradients = [whole(one.grad) for one in model.parameters()]
    return (
        *(whole(loss.detach()), *gradients),
        *(one.clone() for one in model.buffers()),
        torch.get_rng_state(),
    )


def same(sizes: dict[str, int], kinds: list[Any], build: Callable[[Any], nn.Module], *inputs: Any):
    def on_a_rank(rank: int, world_size: int) -> None:
        expected = step(build(None), *inputs)
        for kind in kinds:
            for one, other in zip(step(build(kind), *inputs), expected, strict=True):
                assert torch.equal(one, other), kind

    vescale_comm.simulate(torch.Size(sizes.values()).numel())(on_a_rank)


KINDS = ["full", "selective", 2, "2KB", {"blocks.0": "none", "blocks.*": "save: bmm, aten::addmm"}]


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"tp": 3}, {"dp": 3}], ids=str)
def test_every_kind_on_every_mesh(sizes: dict[str, int], zero: int):
    def build(kind: Any) -> nn.Module:
        return distributed(make(), sizes, zero, checkpoint=kind)

    same(sizes, KINDS[:3] if zero else KINDS, build, *batch(0))


class Mixed(nn.Module):
    """Attention with dropout, statistics, results that are written to, and a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, *, gain: dict[str, Tensor]) -> Tensor:
        self.seen += 1
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        p = 0.3 if self.seen < 2 else 0.0
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        # Written to twice, this would be another number.
        y = self.out(y.transpose(1, 2).flatten(2)).add_(1).relu_()
        y = self.norm(y.transpose(1, 2)).transpose(1, 2) * gain["by"]
        return x + nn.functional.dropout(y, 0.2)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixed() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, gain={"by": x.mean()})
        return x.square().mean()


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 3}], ids=str)
def test_statistics_attention_and_results_that_are_written_to(sizes: dict[str, int]):
    def build(kind: Any) -> nn.Module:
        torch.manual_seed(0)
        plan = Plan(checkpoint=kind)
        return parallelize(Stack(), make_mesh(device_type="cpu", **sizes), plan)

    same(sizes, ["full", "selective"], build, torch.randn(5, 4, 8))


def test_products_that_are_written_to():
    """Rows times a matrix are a tensor of its own to autograd, in memory of the kept product."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).add_(1).relu_()

    def build(kind: Any) -> nn.Module:
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Block(8, 8, bias=False) for _ in range(3)))
        return alone(blocks, kind)

    x = torch.randn(2, 4, 8)

    def on_a_rank(rank: int, world_size: int) -> None:
        found = []
        for kind in (None, {"*": "selective"}):
            model = build(kind)
            model(x).square().sum().backward()
            found.append([whole(p.grad) for p in model.parameters()])
        torch.testing.assert_close(*found, rtol=0, atol=0)

    vescale_comm.simulate(1)(on_a_rank)


def alone(model: nn.Module, kind: Any) -> nn.Module:
    return parallelize(model, make_mesh(device_type="cpu", dp=1), Plan(checkpoint=kind))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Tanh(), nn.Linear(512, 8))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def held_after_forward(kind: Any) -> int:
    """Bytes that a forward has allocated and not given back, by torch's profiler."""
    model = alone(Wide(), kind)
    inputs = torch.ones(64, 8)
    model(inputs).backward()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        loss = model(inputs)
    del loss
    return sum(one.self_cpu_memory_usage for one in profile.events())


def held(rank: int, world_size: int) -> list[int]:
    return [held_after_forward(kind) for kind in (None, "selective", 2, "full", "1GB")]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11
def test_fewer_activations_are_held_from_forward_to_backward():
    everything, selective, every_other, full, ample = vescale_comm.simulate(1)(held)[0]
    hidden = 64 * 512 * 4
    # Of each block: the result of the first product, which is kept, and that of tanh.
    assert everything - full == pytest.approx(8 * hidden, rel=0.1)
    assert everything - selective == pytest.approx(4 * hidden, rel=0.1)
    assert everything - every_other == pytest.approx(4 * hidden, rel=0.1)
    assert ample == pytest.approx(everything, rel=0.1)


def test_a_copy_recomputes_by_itself_and_hooks_of_the_module_run_once():
    def on_a_rank(rank: int, world_size: int) -> None:
        from copy import deepcopy

        model = alone(Wide(), "full")
        copied = deepcopy(model)
        calls = []
        copied.blocks[0].register_forward_hook(lambda *_: calls.append(1))
        inner = []
        copied.blocks[0][0].register_forward_hook(lambda *_: inner.append(1))
        copied(torch.ones(2, 8)).backward()
        assert len(calls) == 1
        assert len(inner) == 2
        assert all(one.grad is None for one in model.parameters())
        assert all(one.grad is not None for one in copied.parameters())

    vescale_comm.simulate(1)(on_a_rank)


def test_a_second_backward_finds_what_was_kept():
    def on_a_rank(rank: int, world_size: int) -> None:
        model = alone(Wide(), "selective")
        loss = model(torch.ones(2, 8))
        loss.backward(retain_graph=True)
        first = [whole(one.grad).clone() for one in model.parameters()]
        loss.backward()
        for one, two in zip(first, model.parameters(), strict=True):
            torch.testing.assert_close(whole(two.grad), 2 * one)

    vescale_comm.simulate(1)(on_a_rank)


def kept_bytes(model: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, int]:
    """The loss, and bytes of what autograd keeps for backward."""
    kept: list[Any] = []  # held, so that no address is that of two

    def pack(tensor: Tensor) -> Tensor:
        local = tensor._local_tensor if isinstance(tensor, vescale_dtensor.DTensor) else tensor
        kept.append(local.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*inputs)
    return loss, sum({one.data_ptr(): one.nbytes() for one in kept}.values())


@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [({"dp": 2}, ["selective"]), ({"dp": 2, "tp": 2}, [None, *KINDS]), ({"tp": 3}, [None, *KINDS])],
    ids=str,
)
def test_a_captured_model_computes_regions_again_and_keeps_as_little(
    sizes: dict[str, int], kinds: list[Any]
):
    def on_a_rank(rank: int, world_size: int) -> None:
        for kind in kinds:
            models = [distributed(make(), sizes, 0, checkpoint=kind) for _ in range(2)]
            captured = vescale_dtensor.capture(models[1], unguarded=["kept"])
            for number in range(3):
                both, held = [], list[int]()
                for model, call in zip(models, (models[0], captured), strict=True):
                    torch.manual_seed(number)
                    loss, kept = kept_bytes(call, *batch(number))
                    loss.backward()
                    gradients = [whole(one.grad) for one in model.parameters()]
                    both.append((whole(loss.detach()), *gradients, torch.get_rng_state()))
                    held.append(kept)
                assert all(map(torch.equal, *both)), (kind, number)
                assert held[1] <= held[0], (kind, number)  # a program leaves out copies
                for model in models:
                    with torch.no_grad():
                        for one in model.parameters():
                            one.sub_(one.grad, alpha=0.1)
                    model.zero_grad()
            assert captured.replays == 2, kind

    vescale_comm.simulate(torch.Size(sizes.values()).numel())(on_a_rank)


def test_a_captured_step_computes_its_regions_again():
    def on_a_rank(rank: int, world_size: int) -> None:
        found = []
        for captures in (False, True):
            torch.manual_seed(1)
            model = alone(Wide(), "full")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def train(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = model(x)
                loss.backward()
                return loss.detach()

            call = vescale_dtensor.capture(train) if captures else train
            torch.manual_seed(3)
            losses = []
            for _ in range(4):
                losses.append(whole(call(torch.ones(2, 8))))
                optimizer.step()
            found.append([*losses, *map(whole, model.state_dict().values())])
            if captures:
                assert call.replays > 0
        assert all(map(torch.equal, *found))

    vescale_comm.simulate(1)(on_a_rank)


def test_a_captured_region_that_would_write_twice_is_refused():
    def on_a_rank(rank: int, world_size: int) -> str:
        counting = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        model = alone(nn.Sequential(counting, nn.Linear(8, 1)), {"0": "full"})
        with pytest.raises(vescale_dtensor.CaptureError) as caught:
            vescale_dtensor.capture(model)(torch.randn(4, 8))
        return str(caught.value)

    assert "would a second time" in vescale_comm.simulate(1)(on_a_rank)[0]


class Cache:
    def get_seq_length(self) -> int:
        return 0

    def update(self) -> None: ...


class Writes(nn.Module):
    """Writes to a buffer that is too large to be kept, or fills what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(20_000))

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        if cache is None:
            self.table += 1
        return self.inner(x)


class Writing(nn.Module):
    def __init__(self, cache: Any) -> None:
        super().__init__()
        self.part, self.cache = Writes(), cache

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x, cache=self.cache).sum()


@pytest.mark.parametrize(
    ("cache", "message"), [(None, "writes to its buffer 'table'"), (Cache(), "use_cache=False")]
)
def test_what_would_happen_twice_is_refused(cache: Any, message: str):
    def on_a_rank(rank: int, world_size: int) -> None:
        with pytest.raises(ParallelError, match=message):
            alone(Writing(cache), {"part": "full"})(torch.ones(1, 2))

    vescale_comm.simulate(1)(on_a_rank)


class Noting(nn.Module):
    """Appends to a list of its caller's, as routers do with their auxiliary losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, losses: list[Tensor], seen: dict[str, list[int]]) -> Tensor:
        y = torch.dropout(self.layer(x), 0.5, train=True)
        seen["counts"].append(len(losses))
        losses.append(y.square().mean())
        return y if len(losses) == 1 else y + losses[0]


class Noted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noting() for _ in range(3))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        seen: dict[str, list[int]] = {"counts": []}
        for block in self.blocks:
            x = block(x, losses, seen)
        self.seen = seen["counts"]
        return x.sum() + torch.stack(losses).sum()


def test_lists_that_a_block_appends_to_are_the_callers():
    def build(kind: Any) -> nn.Module:
        torch.manual_seed(1)
        return parallelize(Noted(), make_mesh(dp=1, device_type="cpu"), Plan(checkpoint=kind))

    x = torch.randn(6, 4)

    def on_a_rank(rank: int, world_size: int) -> None:
        expected = step(build(None), x)
        for kind in ("full", 2, "selective"):
            model = build(kind)
            for one, other in zip(step(model, x), expected, strict=True):
                assert torch.equal(one, other), kind
            assert model.seen == [0, 1, 2]

    vescale_comm.simulate(1)(on_a_rank)


@pytest.mark.parametrize("how", ["full", "selective"])
def test_one_row_over_two_axes_is_computed_again_where_it_was(how: str):
    def gradients(plan: Plan | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.SiLU()) for _ in range(2)))
        if plan is not None:
            parallelize(model, make_mesh(a=2, b=2, device_type="cpu"), plan)
        model(torch.randn(1, 3, 4)).square().mean().backward()
        return [whole(one.grad) for one in model.parameters()]

    plan = Plan(batch="a:0, b:0", checkpoint=how)
    wanted = gradients(None)
    for found in vescale_comm.simulate(4).run(lambda rank, world_size: gradients(plan)):
        torch.testing.assert_close(found, wanted)
