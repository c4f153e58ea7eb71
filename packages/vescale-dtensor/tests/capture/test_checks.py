"""`capture(check=...)` changes nothing but the time it takes, and all ranks compare or none does.

What the function and the program change is restored in between: gradients of arguments, tensors of
inference mode. Ranks that would record at different calls, or look at one, do not wait for others.
"""

import pytest
import torch
import vescale_dtensor as vd
from capture_guards import rows, spread
from torch import nn
from vescale_comm.testing import on_ranks, run
from vescale_dtensor import Replicate


def leaves_among_arguments(rank, world_size):
    weight = torch.ones(4, requires_grad=True)

    def step(x, more):
        (x * weight + more).sum().backward()

    captured = vd.capture(step, check=True)
    for seed in range(3):
        pairs = []
        for function in (captured, step):
            weight.grad = None
            x = spread(rows(seed=seed)).requires_grad_()
            more = rows(1, 4, seed=seed).requires_grad_()
            for _ in range(2):
                function(x, more)
            pairs.append((x.grad.full_tensor(), more.grad, weight.grad))
        for one, two in zip(*pairs, strict=True):
            assert torch.equal(vd_whole(one), vd_whole(two))


def vd_whole(value):
    return value.full_tensor() if isinstance(value, vd.DTensor) else value


def inference(rank, world_size):
    norm = nn.BatchNorm1d(4)
    total = torch.zeros(4)

    def step(x, out):
        x.mul_(2)
        torch.add(x.to_local(), 1, out=out)
        norm(x.to_local().clone())
        total.add_(1)
        x[:, 1:3] += 1

    for check in (False, True):
        captured = vd.capture(step, check=check)
        with torch.inference_mode():
            # Tensors of inference mode themselves: others would count versions.
            norm.running_mean, norm.running_var = torch.zeros(4), torch.ones(4)
            norm.num_batches_tracked = torch.zeros((), dtype=torch.long)
            total = torch.zeros(4)
            for seed in range(4):
                found = []
                for function in (captured, step):
                    norm.running_mean.zero_(), total.zero_()
                    x = spread(rows(6, seed=seed))
                    out = torch.empty_like(x.to_local())
                    function(x, out)
                    found.append((x.full_tensor(), out, norm.running_mean.clone(), total.clone()))
                assert all(map(torch.equal, *found)), (check, seed)
        assert captured.programs


def copied_views_in_inference(rank, world_size):
    captured = vd.capture(lambda x: x.add_(1))
    with torch.inference_mode():
        for call in range(3):
            x = spread(rows(5, 6), vd.Shard(1))
            if call == 2:
                view = x.view(3, 10)
                with pytest.raises(vd.UnsupportedError):
                    captured(x)
                assert torch.equal(view.full_tensor().view(5, 6), rows(5, 6))
            else:
                captured(x)
    assert captured.programs


def ranks_that_look(rank, world_size):
    inner = vd.capture(lambda x: (x * 3).sum(), check=True)
    outer = vd.capture(lambda x: inner(x) + 1, check="sampled")
    for call in range(9):
        x = spread(rows(seed=call))
        if rank == call % 3:
            with vd.explain():
                found = outer(x)
        else:
            found = outer(x)
        assert torch.equal(found.full_tensor(), ((x * 3).sum() + 1).full_tensor())


def histories(rank, world_size):
    captured = vd.capture(lambda x: x.sum().backward(), check=True)
    weight = spread(torch.ones(4), Replicate()).requires_grad_()
    captured(spread(rows()) * weight)
    with pytest.raises(vd.CaptureError, match="only once"):
        captured(spread(rows()) * weight)


CASES = [
    leaves_among_arguments,
    inference,
    copied_views_in_inference,
    ranks_that_look,
    histories,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_checked_as_eager(case):
    run(case, 2)


@pytest.mark.parametrize("check", [True, "sampled"])
@on_ranks(2)
def test_ranks_that_record_at_different_calls(rank, world_size, check):
    def step(x, label):
        return (x * 2).sum()

    captured = vd.capture(step, check=check)
    for call in range(12):
        # Each rank has other calls of kinds that are new to it.
        label = call if call % (rank + 2) == 0 else -1
        x = spread(rows(seed=call))
        assert torch.equal(captured(x, label).full_tensor(), step(x, label).full_tensor())
    recorded = captured._misses.recordings
    assert recorded == len({c if c % (rank + 2) == 0 else -1 for c in range(12)})
