"""Property: an initialised piece is the piece of the parameter that torch initialises."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rng_cases import Case, cases, check_every_rank
from rng_pieces import Shard, strided
from torch.nn import init as torch_init
from vescale_rng import DistributionError, init, layout_of, trunc_normal_, whole
from vescale_rng._draw import truncated_normal

NAMES = (
    "uniform_", "normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
    "kaiming_normal_", "orthogonal_",
)  # fmt: skip
FLOATS = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
@given(cases(most=600, orders=False), st.sampled_from(FLOATS))
@settings(max_examples=30)
def test_initialisers(name, case, dtype):
    assume(len(case.shape) >= 2 and 0 not in case.shape)
    if name == "orthogonal_":
        dtype = torch.float64 if dtype == torch.float64 else torch.float32  # as torch has them
    check_every_rank(
        case,
        lambda: getattr(torch_init, name)(torch.empty(case.shape, dtype=dtype)),
        lambda at: getattr(init, name)(torch.empty(at.local_shape, dtype=dtype), layout=at),
    )


@pytest.mark.parametrize("mode", ["fan_in", "fan_out"])
@pytest.mark.parametrize("name", ["kaiming_uniform_", "kaiming_normal_"])
def test_kaiming_of_other_fans_and_gains(name, mode):
    case = Case((6, 4, 3), None, (4,), (Shard(1),))
    for a, nonlinearity in ((5**0.5, "leaky_relu"), (0, "relu"), (0, "tanh")):
        check_every_rank(
            case,
            lambda a=a, n=nonlinearity: getattr(torch_init, name)(torch.empty(6, 4, 3), a, mode, n),
            lambda at, a=a, n=nonlinearity: getattr(init, name)(
                torch.empty(at.local_shape), a, mode, n, layout=at
            ),
        )


def test_gains():
    case = Case((6, 4), None, (4,), (Shard(0),))
    for name in ("xavier_uniform_", "xavier_normal_", "orthogonal_"):
        check_every_rank(
            case,
            lambda name=name: getattr(torch_init, name)(torch.empty(6, 4), 1.7),
            lambda at, name=name: getattr(init, name)(torch.empty(at.local_shape), 1.7, layout=at),
        )


# From never rejected, over sometimes, to nearly always; and the other way of torch 2.13.
TRUNCATED = (
    (0.0, 0.02, -2.0, 2.0), (0.0, 1.0, -2.0, 2.0), (1.0, 1.0, 0.5, 1.5), (0.0, 1.0, 1.0, 2.0),
    (0.3, 0.5, 0.2, 0.35),
)  # fmt: skip


@given(cases(most=800), st.sampled_from(FLOATS), st.sampled_from(TRUNCATED), st.integers(0, 1))
def test_trunc_normal(case, dtype, wanted, warmup):
    check_every_rank(
        case,
        lambda: torch_init.trunc_normal_(strided(case.shape, case.order, dtype), *wanted),
        lambda at: trunc_normal_(strided(at.local_shape, case.order, dtype), *wanted, layout=at),
        order=case.order,
        warmup=warmup,
    )


@pytest.mark.parametrize("shape", [(600, 700), ((1 << 18) + 5,)])
def test_trunc_normal_over_several_windows(shape):
    case = Case(shape, None, (3,), (Shard(len(shape) - 1),))
    for wanted in TRUNCATED[:4]:
        check_every_rank(
            case,
            lambda wanted=wanted: torch_init.trunc_normal_(torch.empty(shape), *wanted),
            lambda at, wanted=wanted: trunc_normal_(
                torch.empty(at.local_shape), *wanted, layout=at
            ),
        )


def test_a_parameter_that_requires_gradients_is_initialised():
    layout = layout_of((6, 4), [Shard(0)], (2,), (1,))
    for name in (*NAMES, "trunc_normal_"):
        parameter = torch.nn.Parameter(torch.empty(3, 4))
        torch.manual_seed(3)
        getattr(init, name)(parameter, layout=layout)
        torch.manual_seed(3)
        expected = getattr(torch_init, name)(torch.empty(6, 4))
        assert torch.equal(parameter.detach(), expected[3:])
        assert parameter.requires_grad
        assert parameter.grad_fn is None


def test_refusals_in_torchs_words():
    with pytest.raises(DistributionError, match="fewer than 2 dimensions"):
        init.kaiming_uniform_(torch.empty(4), layout=whole((4,)))
    with pytest.raises(DistributionError, match="fewer than 2 dimensions"):
        init.xavier_normal_(torch.empty(4), layout=whole((4,)))
    with pytest.raises(DistributionError, match="not supported"):
        init.kaiming_normal_(torch.empty(4, 4), mode="fan_up", layout=whole((4, 4)))
    with pytest.raises(DistributionError, match="2 or more dim"):
        init.orthogonal_(torch.empty(4), layout=whole((4,)))
    with pytest.raises(DistributionError, match="std > 0"):
        trunc_normal_(torch.empty(4), 0.0, -1.0, layout=whole((4,)))


def test_a_mean_far_outside_is_warned_of():
    with pytest.warns(UserWarning, match="two deviations"):
        trunc_normal_(torch.empty(4), 0.0, 1.0, 3.0, 4.0, layout=whole((4,)))


def inverse_of_erf(tensor, mean=0.0, std=1.0, a=-2.0, b=2.0, generator=None):
    """How torch up to 2.12 draws truncated normals."""
    low, high = ((1 + math.erf((x - mean) / std / math.sqrt(2.0))) / 2 for x in (a, b))
    with torch.no_grad():
        tensor.uniform_(2 * low - 1, 2 * high - 1, generator=generator).erfinv_()
        return tensor.mul_(std * math.sqrt(2.0)).add_(mean).clamp_(a, b)


@pytest.fixture
def another_torch(monkeypatch):
    """Replaces the installed `trunc_normal_`, and what is known of it."""

    def install(func):
        monkeypatch.setattr(torch_init, "trunc_normal_", func)
        truncated_normal._way.cache_clear()

    yield install
    truncated_normal._way.cache_clear()


def test_the_way_of_an_older_torch_is_recognised(another_torch):
    another_torch(inverse_of_erf)
    case = Case((7, 9), None, (2,), (Shard(1),))
    for wanted in TRUNCATED:
        check_every_rank(
            case,
            lambda wanted=wanted: torch_init.trunc_normal_(torch.empty(7, 9), *wanted),
            lambda at, wanted=wanted: trunc_normal_(
                torch.empty(at.local_shape), *wanted, layout=at
            ),
        )


def test_an_unknown_way_is_refused(another_torch):
    another_torch(lambda tensor, *_: tensor.zero_())
    with pytest.raises(DistributionError, match="does not know"):
        trunc_normal_(torch.empty(4), std=1.0, layout=whole((4,)))
