"""Property: the pieces that factories make are those of `torch.rand` and its like."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rng_cases import cases, check_every_rank
from rng_pieces import FLOATS
from vescale_rng import LayoutError, ShardLayout, rand, randint, randn


@given(cases(orders=False), st.sampled_from((None, *FLOATS)))
def test_rand_and_randn(case, dtype):
    for theirs, ours in ((torch.rand, rand), (torch.randn, randn)):
        whole, piece = partial(theirs, case.shape, dtype=dtype), partial(ours, dtype=dtype)
        check_every_rank(case, whole, piece)


@given(cases(orders=False), st.sampled_from(((0, 10), (-7, 2**33))))
def test_randint(case, bounds):
    whole = partial(torch.randint, *bounds, case.shape)
    check_every_rank(case, whole, partial(randint, *bounds))


def test_a_layout_without_a_local_shape_is_refused():
    with pytest.raises(LayoutError, match="local_shape"):
        rand(ShardLayout((8,), ()))
