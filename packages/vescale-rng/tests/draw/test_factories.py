"""Property: the pieces that factories make are those of `torch.rand` and its like."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rng_cases import FLOATS, boxes_of, cases
from vescale_rng import LayoutError, ShardLayout, rand, randint, randn


def check(case, one_device, piece):
    torch.manual_seed(21)
    before = torch.get_rng_state()
    expected = one_device()
    after = torch.get_rng_state()
    for coordinate in case.coordinates():
        layout = case.layout(coordinate)
        torch.set_rng_state(before)
        local = piece(layout)
        assert local.dtype == expected.dtype
        assert tuple(local.shape) == layout.local_shape
        for slices, view in boxes_of(local, layout):
            assert torch.equal(view, expected[slices])
        assert torch.equal(torch.get_rng_state(), after)


@given(cases(orders=False), st.sampled_from((None, *FLOATS)))
@settings(max_examples=50, deadline=None)
def test_rand_and_randn(case, dtype):
    check(case, lambda: torch.rand(case.shape, dtype=dtype), lambda at: rand(at, dtype=dtype))
    check(case, lambda: torch.randn(case.shape, dtype=dtype), lambda at: randn(at, dtype=dtype))


@given(cases(orders=False), st.sampled_from(((0, 10), (-7, 2**33))))
@settings(max_examples=50, deadline=None)
def test_randint(case, bounds):
    check(case, lambda: torch.randint(*bounds, case.shape), lambda at: randint(*bounds, at))


def test_a_layout_without_a_local_shape_is_refused():
    with pytest.raises(LayoutError, match="local_shape"):
        rand(ShardLayout((8,), ()))
