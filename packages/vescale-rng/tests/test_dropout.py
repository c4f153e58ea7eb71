"""Property: dropout of the pieces is, forward and backward, `F.dropout` of the whole."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rng_cases import FLOATS, boxes_of, cases, strided
from torch.nn import functional
from vescale_rng import dropout


def cut(whole, layout, order):
    """The local part of a whole tensor."""
    local = strided(layout.local_shape, order, whole.dtype)
    for slices, view in boxes_of(local, layout):
        view.copy_(whole[slices])
    return local


@given(cases(), st.sampled_from(FLOATS), st.sampled_from((0, 0.0, 0.1, 0.5, 1 / 3, 1.0, 1)))
@settings(max_examples=150, deadline=None)
def test_values_gradients_and_generator_are_those_of_one_device(case, dtype, p):
    torch.manual_seed(77)
    x = strided(case.shape, case.order, dtype).normal_().requires_grad_()
    gradient = strided(case.shape, case.order, dtype).normal_()
    before = torch.get_rng_state()
    expected = functional.dropout(x, p, training=True)
    after = torch.get_rng_state()
    (expected_grad,) = torch.autograd.grad(expected, x, gradient)
    for coordinate in case.coordinates():
        layout = case.layout(coordinate)
        local = cut(x.detach(), layout, case.order).requires_grad_()
        torch.set_rng_state(before)
        result = dropout(local, p, layout)
        assert torch.equal(torch.get_rng_state(), after)
        (grad,) = torch.autograd.grad(result, local, cut(gradient, layout, case.order))
        for piece, all_of_it in ((result, expected), (grad, expected_grad)):
            assert torch.equal(piece, cut(all_of_it.detach(), layout, case.order))
