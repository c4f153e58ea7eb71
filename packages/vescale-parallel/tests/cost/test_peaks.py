"""The memory of a step that a plan's cost tells is above what its tensors take, and by how much.

Counted are all tensors of a rank that live at once, at the peak of a step that others preceded:
levels of ZeRO, gathers ahead, reductions behind, precision, levels by rule, stages.
"""

import gc

import pytest
import torch
import torch.nn.functional as F
from peak import Peak
from torch import nn, optim
from vescale_comm import simulate
from vescale_comm.testing import run
from vescale_parallel import Plan, Zero, forward_backward, mesh, parallelize
from vescale_parallel.cost import Precision

WORDS, ROWS = 24, 4
# What the estimate is above the peak, at most: where few tokens leave parameters and gradients to
# rule, and where activations do, of which it counts each product's input and output as kept.
# Offloaded gradients count on the device and on the host, which are one memory here.
ABOVE, ABOVE_ACTIVATIONS, ABOVE_OFFLOADED = 1.5, 2.1, 1.6
FLOAT32 = Precision(compute=4)
HALF = {"compute": "bfloat16", "reduce": "float32"}


class Net(nn.Module):
    def __init__(self, blocks, size):
        super().__init__()
        self.embed = nn.Embedding(WORDS, size)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
            for _ in range(blocks)
        )
        self.head = nn.Linear(size, WORDS, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def peak_and_estimate(words, sizes, length=2, blocks=3, size=64):
    """Of this rank, in bytes."""
    plan = Plan(axes=tuple(sizes), batch="dp:0", parameters={"*": "replicate"}, **words)
    with torch.device("meta"):
        report = plan.check(Net(blocks, size), sizes)
    precision = Precision() if "precision" in words else FLOAT32
    memory = report.cost(ROWS * length, precision=precision).memory
    # On a CPU host and device are one memory, whose peak is looked at.
    estimate = memory.total + memory.host
    gc.collect()
    with Peak() as peak:
        torch.manual_seed(0)
        model = parallelize(Net(blocks, size), mesh(**sizes), plan)
        adam = optim.AdamW(model.parameters(), 0.01)
        tokens = torch.randint(WORDS, (ROWS, length))
        for _ in range(3):
            # The first steps learn the order of units; what built the model is garbage by then.
            gc.collect()
            peak.most = 0
            if "pipeline" in words:
                forward_backward(model, tokens)
            else:
                model(tokens).backward()
            adam.step()
            adam.zero_grad()
    return peak.most, estimate


def compared(rank, world_size, cases):
    return {name: peak_and_estimate(*given) for name, given in cases.items()}


def check(of_ranks, above):
    for name in of_ranks[0]:
        # The estimate is of the rank that holds most.
        peak = max(one[name][0] for one in of_ranks)
        estimate = of_ranks[0][name][1]
        most = ABOVE_OFFLOADED if "offload" in name else above
        assert peak <= estimate <= most * peak, (name, estimate / peak)


def test_one_rank():
    # It shards nothing: all levels are one.
    check(simulate(1).run(compared, {"zero=0": ({}, {"dp": 1})}), ABOVE)


def table():
    """Cases on two ranks of dp: small units, whose reductions all wait, and large ones."""
    dp = {"dp": 2}
    found = {}
    for zero in range(4):
        found[f"zero={zero}"] = {"zero": zero}, dp
        found[f"zero={zero} half"] = {"zero": zero, "precision": HALF}, dp
        found[f"zero={zero} large"] = {"zero": zero}, dp, 2, 3, 640
    for zero in (2, 3):
        for behind in (0, 2):
            for prefetch in (0, 1, 3):
                words = {"zero": Zero(zero, reduce_ahead=behind, prefetch=prefetch)}
                found[f"zero={zero} {behind=} {prefetch=}"] = words, dp, 2, 6
    for zero in (1, 2, 3):
        for offload in (True, "optimizer"):
            found[f"zero={zero} {offload=}"] = {"zero": Zero(zero, offload=offload)}, dp
            found[f"zero={zero} {offload=} large"] = (
                {"zero": Zero(zero, offload=offload)},
                dp,
                2,
                3,
                640,
            )
    found["by rule"] = {"zero": {"embed*": 1, "blocks.0.*": 0, "blocks.1.*": 2, "*": 3}}, dp
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(4))
def test_all_of_them_on_two_ranks(part):
    cases = dict([*table().items()][part::4])
    check(run(compared, 2, cases, timeout=280), ABOVE)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stages():
    cases = {
        f"zero={zero} {name}": (
            {"zero": zero, "pipeline": name, "microbatches": 2},
            {"dp": 2, "pp": 2},
            2,
            4,
        )
        for zero in range(4)
        for name in ("1f1b",)
    }
    check(run(compared, 4, cases, timeout=280), ABOVE_ACTIVATIONS)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_where_activations_rule():
    cases = {f"{z} {n}": ({"zero": z}, {"dp": 2}, n) for z in range(4) for n in (32, 256)}
    check(run(compared, 2, cases, timeout=280), ABOVE_ACTIVATIONS)
