"""Property: dropout of the pieces is `F.dropout` of the whole; its family has more of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rng_cases import cases, cut
from rng_pieces import Shard, strided
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from vescale_rng import Box, ShardLayout, dropout, layout_of, use, whole


@given(cases(), st.lists(st.sampled_from((0.1, 0.5, 1 / 3, 1, 0)), min_size=2, max_size=6))
def test_a_layout_that_was_used_before_draws_on(case, chances):
    """What is remembered of the first dropout holds for the next, of another dtype or policy."""
    wanted = [(p, dtype) for p in chances for dtype in (torch.float32, torch.float64)] * 2
    x = {dtype: strided(case.shape, case.order, dtype).fill_(2) for _, dtype in wanted}
    torch.manual_seed(77)
    expected = [functional.dropout(x[dtype], p, training=True) for p, dtype in wanted]
    after = torch.get_rng_state()
    for coordinate in case.coordinates():
        layout = case.layout(coordinate)
        torch.manual_seed(77)
        for index, (p, dtype) in enumerate(wanted):
            local = cut(x[dtype], layout, case.order)
            drawn = dropout(local, p, layout)
            assert torch.equal(drawn, cut(expected[index], layout, case.order))
            if index == len(chances):
                kept = torch.get_rng_state()
                with use("portable"):
                    dropout(local, p, layout)  # which draws by another map, and not by this one
                torch.set_rng_state(kept)
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.smoke
def test_a_second_derivative_is_that_of_one_device():
    layout = layout_of((6, 8), [Shard(1)], (2,), (1,))
    torch.manual_seed(2)
    x = torch.randn(6, 8, dtype=torch.float64)
    torch.manual_seed(5)
    whole_x = x.clone().requires_grad_()
    expected = second(functional.dropout(whole_x**3, 0.4, training=True), whole_x)
    torch.manual_seed(5)
    local = x[:, 4:].contiguous().requires_grad_()
    assert torch.equal(second(dropout(local**3, 0.4, layout), local), expected[:, 4:])


def second(y, x):
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return torch.autograd.grad((first * first).sum(), x)[0]


@pytest.mark.parametrize("p", [0, 1, 0.0, 1.0])
def test_the_ends_draw_nothing_in_torch_and_here(p):
    before = torch.get_rng_state()
    x = torch.randn(5, generator=torch.Generator().manual_seed(1))
    expected = functional.dropout(x, p, training=True)
    assert torch.equal(dropout(x, p, whole((5,))), expected)
    assert torch.equal(torch.get_rng_state(), before)


STRIDES = [
    (lambda: torch.ones(6, 8)[:, :4], (8, 1)),
    (lambda: torch.ones(4, 6).t(), (1, 6)),
    (lambda: torch.ones(6, 1).expand(6, 4), (1, 0)),
]


@pytest.mark.parametrize(("make", "strides"), STRIDES)
def test_any_strides_of_the_local_tensor(make, strides):
    torch.manual_seed(5)
    expected = functional.dropout(torch.ones(6, 8), 0.4, training=True)
    box = Box((0, 4), (6, 4), 0, strides)
    torch.manual_seed(5)
    assert torch.equal(dropout(make(), 0.4, ShardLayout((6, 8), (box,))), expected[:, 4:])


def test_checkpointing_draws_the_same_mask_again():
    layout = layout_of((6, 8), [Shard(0)], (2,), (1,))
    x = torch.ones(3, 8, requires_grad=True)
    torch.manual_seed(5)
    y = checkpoint(lambda t: dropout(t, 0.5, layout), x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, y.detach())
