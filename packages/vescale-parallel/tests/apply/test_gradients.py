"""Gradients are summed right, in few collectives, in an order that ranks share."""

import copy

import pytest
import torch
from torch import nn
from vescale_comm import simulate, trace
from vescale_comm.testing import on_ranks, run
from vescale_dtensor import DTensor, half_sums
from vescale_dtensor.storage import PendingGradient as Pending
from vescale_parallel import mesh as make_mesh
from vescale_parallel import parallelize
from vescale_parallel._apply.gradients import BucketedReducer, by_group


def test_kinds_are_not_interleaved():
    here, there, x = object(), object(), torch.zeros(4)
    pending = [
        Pending(x, here, ("dp",)),
        Pending(x, here, ("dp", "tp")),
        Pending(x, here, ("dp",)),
        Pending(x, there, ("dp",)),
        Pending(x, here, ("dp", "tp")),
    ]
    assert by_group(pending) == [[0, 2], [1, 4], [3]]


def test_a_cap_below_one_byte_is_refused():
    with pytest.raises(ValueError, match="cap_bytes=0"):
        BucketedReducer(0)


def reduce_some(rank: int, world_size: int, cap: int) -> tuple[list[torch.Tensor], dict[str, int]]:
    here = make_mesh(dp=2, tp=2, device_type="cpu")
    locals_ = [torch.full((2, 3), float(rank)), torch.ones(()), torch.full((5,), rank * 10.0)]
    axes = [("dp",), ("dp", "tp"), ("dp",)]
    given = [Pending(x, here, a) for x, a in zip(locals_, axes, strict=True)]
    with trace() as seen:
        totals = BucketedReducer(cap)(given)
    assert [t.shape for t in totals] == [x.shape for x in locals_]
    return totals, seen.counts()


@pytest.mark.parametrize(("cap", "collectives"), [(1000, 2), (8, 3)])
def test_sums_over_the_axes_that_owe_them(cap: int, collectives: int):
    for rank, (totals, counts) in enumerate(run(reduce_some, 4, cap)):
        # Ranks 0, 2 and 1, 3 share a coordinate on tp and add up over dp.
        over_dp = 2.0 * (rank % 2) + 2.0
        assert torch.equal(totals[0], torch.full((2, 3), over_dp))
        assert totals[1].item() == 4.0
        assert torch.equal(totals[2], torch.full((5,), 10 * over_dp))
        assert counts == {"all_reduce": collectives}


def reduce_halves(rank: int, world_size: int) -> list[list[torch.Tensor]]:
    here = make_mesh(dp=4, device_type="cpu")
    sign = 1 if rank < 2 else -1
    locals_ = [torch.full((n,), sign * 60032.0) for n in (3, 5000, 7)]
    kinds = [torch.float16, torch.float16, torch.float32]
    found = []
    for how in ("float32", "native"):
        with half_sums(how):
            pending = [
                Pending(x.to(dtype), here, ("dp",)) for x, dtype in zip(locals_, kinds, strict=True)
            ]
            found.append(BucketedReducer()(pending))
    return found


def test_half_precision_gradients_that_cancel_are_finite_in_buckets():
    for totals, native in run(reduce_halves, 4):
        for total in totals:
            assert torch.equal(total, torch.zeros_like(total))
        assert not native[1].isfinite().all()
        assert torch.equal(native[2], totals[2])


@pytest.mark.parametrize("name", ["SGD", "Rprop"])
def test_a_step_sums_gradients_once(name: str):
    """Also where an optimizer first only copies them, as momentum does."""
    options = {"momentum": 0.9, "weight_decay": 0.01} if name == "SGD" else {}

    def steps(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        model = parallelize(copy.deepcopy(plain), make_mesh(device_type="cpu", dp=world_size))
        pairs = [
            (one, getattr(torch.optim, name)(one.parameters(), lr=0.1, **options))
            for one in (plain, model)
        ]
        for seed in range(3):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
            for one, optimizer in pairs:
                optimizer.zero_grad()
                one(x).square().mean().backward()
                with trace() as seen:
                    optimizer.step()
            assert len(seen.records) == 1
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.full_tensor(), other)
        for state in pairs[1][1].state.values():
            kept = [one for one in state.values() if isinstance(one, DTensor)]
            assert not any(one.placements[0].is_partial() for one in kept)

    simulate(2)(steps)


@on_ranks(2, simulated=True)
def test_totals_become_gradients_without_a_copy(rank: int, world_size: int):
    """What the sum of a bucket returns is `.grad`, until somebody looks before the step."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model = parallelize(copy.deepcopy(plain), make_mesh(device_type="cpu", dp=world_size))
    pairs = [
        (one, torch.optim.AdamW(one.parameters(), lr=0.1, fused=True)) for one in (plain, model)
    ]
    for seed, (looks, micros) in enumerate([(False, 1), (False, 3), (True, 2), (False, 1)]):
        for one, optimizer in pairs:
            optimizer.zero_grad()
            for micro in range(micros):
                generator = torch.Generator().manual_seed(10 * seed + micro)
                one(torch.randn(4, 4, generator=generator)).square().mean().backward()
            if looks:
                nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            optimizer.step()
        gradients = [own.grad.to_local() for own in model.parameters()]
        buffers = {own.untyped_storage().data_ptr() for own in gradients}
        assert len(buffers) == (len(gradients) if looks else 1)
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), other.grad)
            torch.testing.assert_close(own.full_tensor(), other)
