"""DDP with ordered reductions has the gradients of one process, bit by bit."""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from vescale_comm import CommArgumentError, ddp
from vescale_comm.testing import run
from vescale_comm_worlds import refusals, trace_of_ours


def model():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 5, bias=False), nn.LayerNorm(5), nn.Linear(5, 1)
    )


def loss_of(module, index, scale=1.0):
    data = torch.randn(7, 13, generator=torch.Generator().manual_seed(index))
    return module(data).square().mean() * scale


def one_after_the_other(count, steps):
    """One process: the microbatches one after the other, then one division."""
    # A worker too: kernels may add in another order where there are more threads.
    return run(alone, 1, count, steps)[0]


def alone(rank, world_size, count, steps):
    module, found = model(), []
    for step in range(steps):
        module.zero_grad()
        for rank in range(count):
            loss_of(module, 10 * step + rank).backward()
        found.append([p.grad / count for p in module.parameters()])
    return found


# Several buckets: torch's second backward divides them anew.
BUCKETS = 0.0005  # MB


def train(rank, world_size, steps, how, accumulate=False):
    module = DistributedDataParallel(model(), bucket_cap_mb=BUCKETS)
    if how is not None:
        ddp.install(module, **how)
    found = []
    for step in range(steps):
        module.zero_grad()
        with trace_of_ours() as sent:
            if accumulate:
                with module.no_sync():
                    loss_of(module, 10 * step + rank, 0.5).backward()
            loss_of(module, 10 * step + rank, 0.5 if accumulate else 1.0).backward()
        found.append([p.grad.clone() for p in module.parameters()])
    return found, sent.counts()


def same(found, expected):
    return all(torch.equal(a, b) for x, y in zip(found, expected, strict=True)
               for a, b in zip(x, y, strict=True))  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_have_the_bits_of_microbatches_one_after_the_other(world_size):
    expected = one_after_the_other(world_size, 3)
    for found, counts in run(train, world_size, 3, {"order": "rank"}):
        assert same(found, expected)
        assert counts["all_reduce"] > 1, "buckets are reduced one by one"


def test_without_it_they_have_not():
    found, _ = run(train, 4, 1, None)[0]
    assert not same(found, one_after_the_other(4, 1))


def test_halves_that_are_accumulated_are_reduced_once():
    expected = one_after_the_other(2, 2)
    for found, counts in run(train, 2, 2, {"order": "rank"}, True):
        assert same(found, expected), "of two equal halves, added on each rank"
        assert counts == run(train, 2, 2, {"order": "rank"})[0][1]


@pytest.mark.parametrize("how", [{"wire": "bf16"}, {"wire": "int8", "feedback": True}])
def test_compressed_gradients_are_near_and_equal_on_all_ranks(how):
    expected = one_after_the_other(3, 2)
    ranks = [found for found, _ in run(train, 3, 2, how)]
    assert same(ranks[0], ranks[1])
    for one, other in zip(ranks[0][-1], expected[-1], strict=True):
        assert (one - other).norm() < 0.05 * other.norm()


class LargeAndSmall(nn.Module):
    """Two parameters of a bucket, in which torch swaps them after the first backward."""

    def __init__(self):
        super().__init__()
        self.large, self.small = (nn.Parameter(torch.ones(300)) for _ in range(2))
        self.slopes = [torch.linspace(1, 2, 300) * scale for scale in (1000, 1)]

    def forward(self):
        return (self.large * self.slopes[0]).sum() + (self.small * self.slopes[1]).sum()


def swapped(rank, world_size):
    module = DistributedDataParallel(LargeAndSmall())
    ddp.install(module, wire="int8", feedback=True)
    total = torch.zeros(2, 300)
    for _ in range(3):
        module.zero_grad()
        module().backward()
        total += torch.stack([p.grad for p in module.parameters()])
    return total


def test_what_was_lost_is_added_to_the_same_parameters():
    for total in run(swapped, 2):
        for found, slope in zip(total, LargeAndSmall().slopes, strict=True):
            # The second encoding, of the sum, is not compensated; half a step of 127 for each.
            assert (found - 3 * slope).abs().max() < 3 * slope.max() / 127


def raising(rank, world_size):
    """A backward that raises on all ranks after its first buckets, and one that does not."""
    module = ddp.install(DistributedDataParallel(model(), bucket_cap_mb=BUCKETS), order="rank")
    loss_of(module, rank).backward()
    module.zero_grad()

    def refuse(gradient):
        raise ArithmeticError("no more")

    handle = module.module[0].weight.register_hook(refuse)
    with contextlib.suppress(ArithmeticError):
        loss_of(module, rank).backward()
    handle.remove()
    return rank


def test_a_backward_that_raises_ends():
    assert run(raising, 2) == [0, 1]


def test_what_does_not_fit_is_said():
    with pytest.raises(CommArgumentError, match="is no DistributedDataParallel"):
        ddp.install(model())


BAD = {
    "sideways": {"order": "sideways"},
    "'bf16'": {"wire": "fp3"},
    "pass wire= too": {"feedback": True},
}


def bad(rank, world_size):
    module = DistributedDataParallel(model())
    return refusals({words: partial(ddp.install, module, **how) for words, how in BAD.items()})


def test_bad_arguments_name_what_there_is():
    for found in run(bad, 2):
        assert list(found) == list(BAD)
        for words, (kind, said) in found.items():
            assert (kind, words in said) == ("CommArgumentError", True), said
