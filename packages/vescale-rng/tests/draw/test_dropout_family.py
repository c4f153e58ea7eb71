"""Property: dropout and every relative of it is, on the pieces, what torch gives for the whole.

Forward, backward, mask, and the generator afterwards.
"""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from rng_cases import cases, check_every_rank, cut
from rng_pieces import FLOATS, Shard, boxes_of, strided
from torch.nn import functional
from vescale_rng import (
    DistributionError,
    alpha_dropout,
    dropout,
    feature_alpha_dropout,
    feature_dropout,
    layout_of,
    native_dropout,
    whole,
)

P = (0, 0.0, 0.1, 0.5, 1 / 3, 1.0, 1)
FAMILY = {
    dropout: lambda x, p: functional.dropout(x, p, training=True),
    alpha_dropout: lambda x, p: functional.alpha_dropout(x, p, training=True),
    feature_dropout: lambda x, p: torch.feature_dropout(x, p, True),
    feature_alpha_dropout: lambda x, p: torch.feature_alpha_dropout(x, p, True),
}


@pytest.mark.parametrize("ours", FAMILY)
@given(cases(most=800), st.sampled_from(FLOATS), st.sampled_from(P))
def test_values_gradients_and_generator_are_those_of_one_device(ours, case, dtype, p):
    assume("feature" not in ours.__name__ or len(case.shape) >= 2)
    torch.manual_seed(77)
    x = strided(case.shape, case.order, dtype).normal_().requires_grad_()
    gradient = strided(case.shape, case.order, dtype).normal_()
    before = torch.get_rng_state()
    expected = FAMILY[ours](x, p)
    after = torch.get_rng_state()
    (expected_grad,) = torch.autograd.grad(expected, x, gradient)
    for coordinate in case.coordinates():
        layout = case.layout(coordinate)
        local = cut(x.detach(), layout, case.order).requires_grad_()
        torch.set_rng_state(before)
        result = ours(local, p, layout)
        assert torch.equal(torch.get_rng_state(), after)
        (grad,) = torch.autograd.grad(result, local, cut(gradient, layout, case.order))
        for piece, all_of_it in ((result, expected), (grad, expected_grad)):
            assert torch.equal(piece, cut(all_of_it.detach(), layout, case.order))


@given(cases(most=800), st.sampled_from(FLOATS), st.sampled_from(P), st.booleans())
def test_native_dropout_and_its_mask(case, dtype, p, train):
    torch.manual_seed(77)
    x = strided(case.shape, case.order, dtype).normal_().requires_grad_()
    gradient = strided(case.shape, case.order, dtype).normal_()
    before = torch.get_rng_state()
    expected, expected_mask = torch.native_dropout(x, p, train)
    after = torch.get_rng_state()
    (expected_grad,) = torch.autograd.grad(expected, x, gradient)
    for coordinate in case.coordinates():
        layout = case.layout(coordinate)
        local = cut(x.detach(), layout, case.order).requires_grad_()
        torch.set_rng_state(before)
        result, mask = native_dropout(local, p, train, layout)
        assert torch.equal(torch.get_rng_state(), after)
        assert mask.dtype == expected_mask.dtype
        assert torch.equal(mask, cut(expected_mask, layout, case.order))
        assert torch.equal(result, cut(expected.detach(), layout, case.order))
        (grad,) = torch.autograd.grad(result, local, cut(gradient, layout, case.order))
        assert torch.equal(grad, cut(expected_grad, layout, case.order))


def test_a_second_derivative_of_native_dropout():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)

    def second(dropped):
        torch.manual_seed(5)
        (first,) = torch.autograd.grad(dropped(x**3).sum(), x, create_graph=True)
        return torch.autograd.grad((first * first).sum(), x)[0]

    ours = second(lambda y: native_dropout(y, 0.4, True, whole((3, 8)))[0])
    assert torch.equal(ours, second(lambda y: torch.native_dropout(y, 0.4, True)[0]))


@pytest.mark.parametrize("ndim", [3, 4, 5])
def test_the_features_of_modules(ndim):
    shape = (4, 6, 2, 3, 2)[:ndim]
    module = {3: torch.nn.Dropout1d, 4: torch.nn.Dropout2d, 5: torch.nn.Dropout3d}[ndim](0.5)
    x = torch.ones(shape)
    torch.manual_seed(9)
    expected = module(x)
    layout = layout_of(shape, [Shard(ndim - 1, blocks=1), Shard(1)], (2, 2), (1, 0))
    torch.manual_seed(9)
    local = torch.ones(layout.local_shape)
    found = feature_dropout(local, 0.5, layout)
    for slices, view in boxes_of(found, layout):
        assert torch.equal(view, expected[slices])


def test_feature_dropout_takes_two_dims():
    with pytest.raises(DistributionError, match="two dims"):
        feature_dropout(torch.ones(4), 0.5, whole((4,)))


def test_check_every_rank_can_fail():
    from rng_cases import Case

    case = Case((4, 4), None, (2,), (Shard(0),))
    with pytest.raises(AssertionError):
        check_every_rank(case, lambda: torch.rand(4, 4), lambda at: torch.rand(at.local_shape))
