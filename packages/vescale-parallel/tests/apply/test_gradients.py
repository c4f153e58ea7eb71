"""Gradients are summed right, in few collectives, in an order that ranks share."""

import pytest
import torch
from vescale_comm import trace
from vescale_comm.testing import run
from vescale_dtensor import PendingGradient as Pending
from vescale_dtensor import half_sums
from vescale_parallel import mesh as make_mesh
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
