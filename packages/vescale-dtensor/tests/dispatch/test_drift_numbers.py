"""Numbers that a call is given are a part of lineages where the log samples, and cost nothing else.

`x * k`, `x[k]`, `x.clamp(max=k)`, fill values, plain tensors without dims (`test_drift.py` has
programs in which a rank with another one is named). One that changes at every step, on all ranks
alike, is no drift, makes no compiled call of its own, and uses up nothing.
"""

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from vescale_comm import execution_log, simulate, testing
from vescale_dtensor import Replicate, Shard, distribute_tensor
from vescale_dtensor._fast_path import cache, compile_general, forms
from vescale_dtensor._layout.executed import nothing
from vescale_dtensor._tensor import lineage

# Each of a tensor that is sharded, one that is replicated, and a number: 1 or 2.
CALLS = {
    "mul": lambda x, y, k: x * k,
    "before": lambda x, y, k: k * x,
    "from": lambda x, y, k: k - x,
    "over": lambda x, y, k: x / k,
    "power": lambda x, y, k: x**k,
    "sum": lambda x, y, k: x.sum() * k,
    "alpha": lambda x, y, k: torch.add(x, x, alpha=k),
    "alpha of a method": lambda x, y, k: x.add(x, alpha=k),
    "clamp": lambda x, y, k: x.clamp(max=k),
    "plain": lambda x, y, k: x * torch.tensor(float(k)),
    "plain before": lambda x, y, k: torch.tensor(float(k)) + x,
    "plain parameter": lambda x, y, k: x * nn.Parameter(torch.tensor(float(k)), False),
    "where": lambda x, y, k: torch.where(x > 0, x, float(k)),
    "full_like": lambda x, y, k: torch.full_like(x, k),
    "new_full": lambda x, y, k: x.new_full((3,), k),
    "masked_fill": lambda x, y, k: x.masked_fill(x > 0, k),
    "index": lambda x, y, k: y[k],
    "slice": lambda x, y, k: y[k : k + 2],
    "last": lambda x, y, k: y[:, -k],
    "select": lambda x, y, k: x.select(1, k),
    "narrow": lambda x, y, k: x.narrow(1, k, 2),
    "roll": lambda x, y, k: y.roll(-k, 0),
    "tril": lambda x, y, k: y.tril(k),
    "cat": lambda x, y, k: torch.cat([y, y.t()], k - 1).sum(),
    "dim": lambda x, y, k: y.softmax(k - 1),
    "named dim": lambda x, y, k: y.cumsum(axis=k - 1),
    "descending": lambda x, y, k: y.sort(dim=1, descending=k == 2)[0],
    "leaky_relu": lambda x, y, k: F.leaky_relu(x, k),
    "softplus": lambda x, y, k: F.softplus(x, beta=k),
    "layer_norm": lambda x, y, k: F.layer_norm(x, (4,), eps=float(k)),
    "huber_loss": lambda x, y, k: F.huber_loss(x, x + 1, delta=k),
    "cross_entropy": lambda x, y, k: F.cross_entropy(x, x.argmax(1), label_smoothing=k / 4),
    "reduction": lambda x, y, k: F.mse_loss(x, x + 1, reduction=["sum", "mean"][k - 1]),
    "rounding": lambda x, y, k: torch.div(x, 3, rounding_mode=["floor", "trunc"][k - 1]),
    "approximate": lambda x, y, k: F.gelu(x, approximate=["none", "tanh"][k - 1]),
    "dtype": lambda x, y, k: x.sum(0, dtype=[torch.float32, torch.float64][k - 1]),
    "lerp": lambda x, y, k: torch.lerp(x, x + 1, k),
    "lists": lambda x, y, k: torch._foreach_mul([x, x], float(k))[1],
    "no rule": lambda x, y, k: torch.linalg.matrix_power(y, k),
    "in place": lambda x, y, k: x.clone().mul_(k),
    "augmented": lambda x, y, k: written(x.clone(), k),
    "fill_": lambda x, y, k: x.clone().fill_(k),
    "set": lambda x, y, k: assigned(x.clone(), k),
    "constant_": lambda x, y, k: nn.init.constant_(x.clone(), k),
    "full": lambda x, y, k: vd.full((3,), k, device_mesh=x.device_mesh),
    "arange": lambda x, y, k: vd.arange(0, 3 * k, k, device_mesh=x.device_mesh),
    "linspace": lambda x, y, k: vd.linspace(0, k, 4, device_mesh=x.device_mesh),
}
# What no rank may be told of: numbers that are another's on each, or that nobody reads.
OF_EACH_RANK = {
    "device": lambda x, y, k: torch.zeros_like(x, device=torch.device("cpu", 0)) + 1,
    "name of a device": lambda x, y, k: torch.zeros_like(x, device="cpu") + 1,
    "unread": lambda x, y, k: torch.addmm(torch.tensor(float(k)), x, y, beta=0),
    "own": lambda x, y, k: x.relu(),
}


def written(x, k):
    x += k
    return x


def assigned(x, k):
    x[0] = k
    return x


def lineages(rank, world_size, call):
    mesh = init_device_mesh("cpu", (world_size,))
    x = distribute_tensor(torch.randn(5, 4), mesh, [Shard(0)])
    y = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()])
    # The first call of a number, a known one, and the other number in between.
    return [call(x, y, k)._lineage for k in (1, 1, 1, 2, 1, 2, 2)]


@pytest.fixture
def sampled(monkeypatch):
    """Where nothing is compared, such as in a simulation, numbers are looked at all the same."""
    monkeypatch.setattr(nothing, "samples", True, raising=False)


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.usefixtures("sampled")
def test_another_number_is_another_lineage_whichever_way_the_call_takes(name, grad):
    with torch.set_grad_enabled(grad):
        (found, *others) = simulate(3).run(lineages, CALLS[name])
    ones, twos = {found[0], *found[1:3], found[4]}, {found[3], *found[5:]}
    assert len(ones) == len(twos) == 1
    assert ones != twos
    assert all(other == found for other in others)


@pytest.mark.parametrize("name", list(OF_EACH_RANK))
@pytest.mark.usefixtures("sampled")
def test_what_each_rank_has_its_own_of_is_none_of_the_numbers(name):
    for found in simulate(2).run(lineages, OF_EACH_RANK[name]):
        assert len(set(found)) == 1


def parameter(world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    x = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    return x, nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))


def scheduled(rank, world_size):
    """Numbers that change at every step, on all ranks alike, and one rank's own ones."""
    x, w = parameter(world_size)
    log = execution_log(range(world_size))
    calls = []
    for step in range(60):
        loss = ((x @ w).clamp(max=1.0 + step) * 0.9**step).mean() * torch.tensor(step / 7)
        loss.backward()
        total = loss.detach().redistribute(placements=[Replicate()])
        if rank == 0:
            f"{(total * 100 * step).item():.2f}"
        with torch.no_grad():
            w.grad.mul_(1 / (1 + step))
            w.add_(w.grad, alpha=-0.1 / (1 + step))
        w.grad = None
        calls.append(cache.compiled_call_count())
    # Everybody compares all that was executed; nobody finds a difference.
    torch.distributed.barrier()
    assert log._comparison.look() is None
    torch.distributed.barrier()
    return log.count, calls[5] == calls[-1]


def test_numbers_that_change_at_every_step_are_no_drift():
    (_, alike), _ = testing.run(scheduled, 2, timeout=120)
    assert alike  # no compiled call of their own; rank 1 makes fewer calls than rank 0


def counted(rank, world_size):
    x, _ = parameter(world_size)
    log, looks = execution_log(range(world_size)), [0]

    def looked(original):
        def look(*args):
            looks[0] += 1
            return original(*args)

        return look

    patch = pytest.MonkeyPatch()
    for module in (forms, compile_general, lineage):
        patch.setattr(module, "with_numbers", looked(lineage.with_numbers))
    try:
        while log.count < 300:
            (x * log.count).sum().item()
        known, first = len(log._depths), looks[0]
        for step in range(1000):
            ((x * float(step)).sum() * step).item()
    finally:
        patch.undo()
    return first, looks[0] - first, len(log._depths) - known


def test_what_is_compared_later_costs_no_call_and_no_memory():
    for first, later, added in testing.run(counted, 2, timeout=120):
        assert first > 100
        assert later == 0
        assert added < 10  # of numbers that are new a thousand times


def replaced(w):
    w.data = w.data * 2


def regraded(w):
    w.grad = None if w.grad is None else w.grad.clone()


def filled(w):
    w[0] = 3.0


# Writes to a parameter outside of autograd: whole ones, through views, of numbers and of none.
WRITES = {
    "scaled": lambda w: w.mul_(2),
    "zeroed": lambda w: w.zero_(),
    "a list": lambda w: torch._foreach_zero_([w]),
    "data": replaced,
    "gradient": regraded,
    "zeroed data": lambda w: w.data.zero_(),
    "an item": filled,
    "a row": lambda w: w[0].zero_(),
    "a row's factor": lambda w: w[1].mul_(2),
    "a part": lambda w: w.chunk(2)[1].fill_(2),
    "another shape": lambda w: w.view(2, 8).add_(1),
    "copied": lambda w: w.copy_(w * 3),
    "initialised": lambda w: nn.init.constant_(w[2:], 0.5),
}


def written_without_grad(rank, world_size, placement):
    mesh = init_device_mesh("cpu", (world_size,))
    log, found = execution_log(range(world_size)), {}
    for name, write in WRITES.items():
        whole = nn.Parameter(torch.arange(16.0).view(4, 4))
        w = nn.Parameter(distribute_tensor(whole.detach().clone(), mesh, [placement]))
        for _ in range(2):
            (w * 2).sum().backward()
        before = log.digest
        for each in (w, whole):
            with torch.no_grad():
                write(each)
        found[name] = log.digest != before
        assert w.is_leaf
        (w * w).sum().backward()
        torch.testing.assert_close(w.grad.full_tensor(), 2 * whole.detach() + 4)
    return found


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_a_write_to_a_parameter_is_known_at_the_end_if_nothing_follows(placement):
    """Those that one rank makes alone in its last step are told when the program ends."""
    for found in testing.run(written_without_grad, 2, placement):
        missing = [name for name, noted in found.items() if not noted]
        assert not missing
