"""Property: draws with a tensor of parameters are, on the pieces, those of the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rng_cases import cases, check_every_rank, cut
from rng_pieces import FLOATS, strided
from vescale_rng import DistributionError, LayoutError, bernoulli, bernoulli_, normal, whole
from vescale_rng.streams import BernoulliOf, draws, position

OUTPUTS = (*FLOATS, torch.int64, torch.uint8, torch.bool)


def of(case, dtype, seed=3):
    """Numbers between 0 and 1, with both ends among them."""
    generator = torch.Generator().manual_seed(seed)
    values = strided(case.shape, case.order, torch.float32).uniform_(generator=generator)
    return (values * 1.2 - 0.1).clamp_(0, 1).to(dtype)


@given(cases(most=1500), st.sampled_from(OUTPUTS), st.sampled_from(FLOATS), st.integers(0, 1))
def test_bernoulli_in_place(case, dtype, p_dtype, warmup):
    p = of(case, p_dtype)
    check_every_rank(
        case,
        lambda: strided(case.shape, case.order, dtype).bernoulli_(p),
        lambda at: bernoulli_(
            strided(at.local_shape, case.order, dtype), cut(p, at, case.order), at
        ),
        order=case.order,
        warmup=warmup,
    )


@given(cases(most=1500), st.sampled_from(FLOATS))
def test_bernoulli_of_probabilities(case, dtype):
    p = of(case, dtype)
    check_every_rank(
        case, lambda: torch.bernoulli(p), lambda at: bernoulli(cut(p, at, case.order), at)
    )
    check_every_rank(
        case,
        lambda: torch.bernoulli(p, 0.3),
        lambda at: bernoulli(cut(p, at, case.order), at, p=0.3),
    )


@given(cases(most=1500), st.sampled_from(FLOATS), st.integers(0, 2), st.integers(0, 1))
def test_normal_with_tensors(case, dtype, which, warmup):
    mean = of(case, dtype) if which != 1 else 0.7
    std = of(case, dtype, seed=4) if which != 0 else 0.3

    def part(x, layout):
        return cut(x, layout, case.order) if isinstance(x, torch.Tensor) else x

    check_every_rank(
        case,
        lambda: torch.normal(mean, std),
        lambda at: normal(part(mean, at), part(std, at), at),
        warmup=warmup,
    )


def test_parameters_broadcast():
    mean, std = torch.rand(3, 1), torch.rand(1, 40)
    torch.manual_seed(1)
    expected = torch.normal(mean, std)
    torch.manual_seed(1)
    assert torch.equal(normal(mean, std, whole((3, 40))), expected)
    torch.manual_seed(1)
    expected = torch.empty(3, 40).bernoulli_(mean)
    torch.manual_seed(1)
    assert torch.equal(bernoulli_(torch.empty(3, 40), mean, whole((3, 40))), expected)


def test_gradients_are_those_of_torch():
    for ours, torchs in (
        (lambda x: bernoulli(x, whole((5,))), torch.bernoulli),
        (lambda x: normal(x, 1.0, whole((5,))), lambda x: torch.normal(x, 1.0)),
        (lambda x: normal(x, x, whole((5,))), lambda x: torch.normal(x, x)),
    ):
        x = torch.rand(5, requires_grad=True)
        found, expected = ours(x), torchs(x)
        assert found.requires_grad == expected.requires_grad
        for result in (found, expected):
            (gradient,) = torch.autograd.grad(result.sum(), x)
            assert torch.equal(gradient, torch.zeros(5))


def test_a_number_is_a_probability_too():
    torch.manual_seed(1)
    expected = torch.empty(40).bernoulli_(0.3)
    torch.manual_seed(1)
    assert torch.equal(bernoulli_(torch.empty(40), 0.3), expected)


@pytest.mark.parametrize("p_dtype", FLOATS)
def test_the_words_are_known_before(p_dtype):
    generator = torch.Generator().manual_seed(2)
    start = position(generator)
    torch.empty(7, 9).bernoulli_(torch.full((7, 9), 0.5, dtype=p_dtype), generator=generator)
    words = draws(BernoulliOf(p_dtype), (7, 9), torch.float32)
    assert start.after(words) == position(generator)


def test_refusals():
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(DistributionError, match="between 0 and 1"):
            bernoulli_(torch.empty(3), torch.tensor([0.5, bad, 0.5]), whole((3,)))
    with pytest.raises(LayoutError, match="do not broadcast"):
        bernoulli_(torch.empty(3), torch.rand(4), whole((3,)))
    with pytest.raises(DistributionError, match="torch says"):
        bernoulli_(torch.empty(3), torch.ones(3, dtype=torch.int64), whole((3,)))
    with pytest.raises(DistributionError, match="at least 0"):
        normal(0.0, torch.tensor([1.0, -1.0]), whole((2,)))
    with pytest.raises(DistributionError, match="two numbers"):
        normal(0.0, 1.0, whole((2,)))
