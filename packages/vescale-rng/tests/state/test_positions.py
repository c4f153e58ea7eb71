"""Property: how far an op goes is known without running it, and an op can be run anywhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rng_cases import cases
from rng_cases import draws as draw_kinds
from rng_pieces import strided
from vescale_rng import LayoutError, Normal, Uniform
from vescale_rng.streams import advance, at, draws, position, skip


@given(cases(), draw_kinds(), st.integers(0, 3))
def test_draws_and_skip_foresee_the_op(case, kind, warmup):
    distribution, dtype = kind
    ran = torch.Generator().manual_seed(4)
    torch.empty(warmup).normal_(generator=ran)
    start = position(ran)
    skipped = torch.Generator()
    skipped.set_state(ran.get_state())
    distribution.draw(strided(case.shape, case.order, dtype), ran)
    cached = start.normal is not None
    words = draws(distribution, case.shape, dtype, memory_order=case.order, cached=cached)
    # The words alone say where the stream is; the cached sample is left to `skip`.
    there, end = start.after(words), position(ran)
    assert (there.words, there.index) == (end.words, end.index)
    skip(distribution, case.shape, dtype, memory_order=case.order, generator=skipped)
    assert torch.equal(skipped.get_state(), ran.get_state())


def test_an_op_runs_at_a_place_and_nothing_else_moves():
    generator = torch.Generator().manual_seed(8)
    place = position(generator)
    expected = torch.empty(50).normal_(generator=generator)
    before = generator.get_state()
    with at(place, generator):
        assert torch.equal(torch.empty(50).normal_(generator=generator), expected)
    assert torch.equal(generator.get_state(), before)


def test_at_returns_also_after_an_error():
    generator = torch.Generator().manual_seed(8)
    place = position(generator)
    advance(100, generator)
    before = generator.get_state()
    with pytest.raises(KeyError), at(place, generator):
        raise KeyError
    assert torch.equal(generator.get_state(), before)


def test_the_default_dtype_is_torchs():
    assert draws(Uniform(), (100,)) == 100
    assert draws(Uniform(), (100,), torch.float64) == 200


def test_an_impossible_shape_is_refused():
    with pytest.raises(LayoutError, match="negative"):
        draws(Normal(), (4, -1))
    with pytest.raises(LayoutError, match="each dim"):
        skip(Normal(), (4, 4), memory_order=(0, 0))
