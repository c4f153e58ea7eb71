"""Custom autograd.Functions are refused where their history would be lost, and else recorded.

No mode sees that a Function gives its results a history. The first use of one shows it.
"""

import pytest
import torch
import vescale_dtensor as vd
from capture_guards import rows, spread
from function_cases import Gathered, Masked, Nested, Pair, Returned, Scaled, Viewed, Written
from vescale_comm.testing import on_ranks
from vescale_dtensor import Replicate, Shard

# Of `x`, which has a history, and a weight.
ON_EITHER = {
    "used": lambda x, v: Scaled.apply(x) * v,
    "returned": lambda x, v: Scaled.apply(x, 2.0),
    "two results": lambda x, v: sum(Pair.apply(x, x.sin(), 2.0)),
    "random numbers": lambda x, v: Masked.apply(x) * v,
    "a view": lambda x, v: Viewed.apply(x) * 2,
    "one inside of another": lambda x, v: Nested.apply(x),
    "one after another": lambda x, v: Viewed.apply(Scaled.apply(x.sin())).cos(),
    "an argument returned": lambda x, v: Returned.apply(x) * 2,
    "differentiated inside": lambda x, v: (
        torch.autograd.grad(Scaled.apply(x).sum(), v, retain_graph=True)[0] * x
    ),
}
PLAIN_ONLY = {
    "an argument written": lambda x, v: Written.apply(x * 1) * 2,
    "an argument written and not used": lambda x, v: (Written.apply(x * 1), x * 2)[1],
}
SHARDED_ONLY = {
    "plain results": lambda x, v: Gathered.apply(x) * 2,
    "local tensors": lambda x, v: vd.local_map(Scaled.apply, out_placements=[Shard(0)])(x) * v,
}
RECORDED = {
    "without a gradient": lambda x, v: Scaled.apply(x.detach()) + x,
    "a result that is not used": lambda x, v: (Scaled.apply(x), x * 2)[1],
}


def stepping(case, place):
    weight = place(torch.ones(4)).requires_grad_()

    def step(x):
        return case(x * weight, weight)

    def gradients(function, x):
        weight.grad = None
        out = function(x)
        out.square().sum().backward()
        found = [out.detach(), weight.grad, torch.rand(())]
        return [one.full_tensor() if isinstance(one, vd.DTensor) else one for one in found]

    return step, gradients


def alike(case, place, batch, refused):
    """Whether calls of a function that runs on where it is refused give what eager mode gives."""
    (step, gradients), (twin, its) = (stepping(case, place) for _ in range(2))
    runs_on = vd.capture(step, refused="run")
    for seed in range(3):
        torch.manual_seed(seed)
        found = gradients(runs_on, batch(seed))
        torch.manual_seed(seed)
        assert all(map(torch.equal, found, its(twin, batch(seed))))
    assert bool(runs_on.refusal) == refused
    if refused:
        with pytest.raises(vd.CaptureError, match="custom autograd"):
            vd.capture(stepping(case, place)[0])(batch(0))


@pytest.mark.parametrize("name", [*ON_EITHER, *PLAIN_ONLY, *RECORDED])
@on_ranks(1, simulated=True)
def test_of_plain_tensors(name):
    cases = ON_EITHER | PLAIN_ONLY | RECORDED
    alike(cases[name], lambda value: value, lambda seed: rows(seed=seed), name not in RECORDED)


@pytest.mark.parametrize("name", [*ON_EITHER, *SHARDED_ONLY, *RECORDED])
@on_ranks(2, simulated=True)
def test_of_dtensors(name):
    cases = ON_EITHER | SHARDED_ONLY | RECORDED
    whole = lambda value: spread(value, Replicate())  # noqa: E731
    alike(cases[name], whole, lambda seed: spread(rows(seed=seed)), name not in RECORDED)


@on_ranks(1, simulated=True)
def test_an_argument_that_a_function_gives_a_history():
    weight = torch.ones(4, requires_grad=True)
    captured = vd.capture(lambda x: (Written.apply(x), weight * 2)[1])
    with pytest.raises(vd.CaptureError, match="custom autograd"):
        captured(weight * 3)
