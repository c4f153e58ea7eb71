"""Property: under the portable policy, `consistent` draws whole tensors by that policy as well.

Parameters, and plain tensors that every rank has: what torch would draw there by itself is native.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vescale_rng import PolicyError, dropout, init, rand, randint, randperm, use, whole
from vescale_rng.torch_dtensor import consistent

SAME = {
    "rand": (lambda: torch.rand(3, 4), lambda: rand(whole((3, 4)))),
    "randint": (lambda: torch.randint(9, (5,)), lambda: randint(0, 9, whole((5,)))),
    "randperm": (lambda: torch.randperm(7), lambda: randperm(7)),
    "dropout": (
        lambda: F.dropout(torch.ones(4, 4), 0.3),
        lambda: dropout(torch.ones(4, 4), 0.3, whole((4, 4))),
    ),
    "trunc_normal_": (
        lambda: nn.init.trunc_normal_(nn.Parameter(torch.empty(3, 4))),
        lambda: init.trunc_normal_(torch.empty(3, 4)),
    ),
    "orthogonal_": (
        lambda: nn.init.orthogonal_(nn.Parameter(torch.empty(3, 4))),
        lambda: init.orthogonal_(torch.empty(3, 4)),
    ),
    "kaiming_uniform_": (
        lambda: nn.init.kaiming_uniform_(nn.Parameter(torch.empty(3, 4))),
        lambda: init.kaiming_uniform_(torch.empty(3, 4)),
    ),
}
REFUSED = {
    "poisson": lambda: torch.poisson(torch.ones(3)),
    "gamma": lambda: torch.distributions.Gamma(torch.ones(3), torch.ones(3)).sample(),
    "rrelu": lambda: F.rrelu(-torch.ones(3), training=True),
    "rand out": lambda: torch.rand(3, out=torch.empty(3)),
}


@pytest.mark.parametrize("data", ["unsaid", None])
@pytest.mark.parametrize("name", SAME)
def test_a_whole_tensor_has_the_numbers_of_the_policy(name, data):
    block = consistent() if data == "unsaid" else consistent(data=data)
    found, expected = SAME[name]
    with use("portable"):
        torch.manual_seed(1)
        with block:
            one = found()
        state = torch.get_rng_state()
        torch.manual_seed(1)
        assert torch.equal(one, expected())
        assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", REFUSED)
def test_an_op_without_a_map_is_refused(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with use("portable"), consistent(), pytest.raises(PolicyError, match="native"):
        REFUSED[name]()
    assert torch.equal(before, torch.get_rng_state())
