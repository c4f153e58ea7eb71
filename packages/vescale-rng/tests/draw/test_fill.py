"""Property: the pieces of any layout, put together, are the tensor that one device draws.

So is what the generator gives next, on every rank, also where the rank holds nothing.
"""

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rng_cases import cases, draws
from rng_pieces import Shard, boxes_of, strided
from vescale_rng import Bernoulli, Exponential, Geometric, Normal, fill_, layout_of, use, whole
from vescale_rng._cpu import stream
from vescale_rng._layout import fill_plan, window_plan
from vescale_rng.streams import skip


def check(case, distribution, dtype, warmup):
    """Fill all shards, compare them and the generators with one device."""
    one = torch.Generator().manual_seed(1234)
    # An odd small normal leaves a sample cached, so that ops start with and without one.
    torch.empty(warmup).normal_(generator=one)
    before = one.get_state()
    expected = strided(case.shape, case.order, dtype)
    distribution.draw(expected, one)
    for coordinate in case.coordinates():
        layout = case.layout(coordinate)
        generator = torch.Generator()
        generator.set_state(before)
        local = strided(layout.local_shape, case.order, dtype)
        assert fill_(local, distribution, layout, generator) is local
        for slices, view in boxes_of(local, layout):
            assert torch.equal(view, expected[slices])
        assert torch.equal(generator.get_state(), one.get_state())


@given(cases(), draws(), st.integers(0, 3))
def test_shards_are_those_of_one_device(case, draw, warmup):
    check(case, *draw, warmup)


@given(cases(), draws(), st.integers(0, 3), st.integers(1, 100))
def test_small_windows_and_early_jumps_change_nothing(case, draw, warmup, window):
    with pytest.MonkeyPatch.context() as patch:
        # The sizes at which the work is cut, brought down to those of the test's tensors.
        patch.setattr(window_plan, "_WINDOW", window)
        patch.setattr(stream, "_JUMP_FROM", 700)
        fill_plan.fill_plan_of.cache_clear()
        check(case, *draw, warmup)
    fill_plan.fill_plan_of.cache_clear()


def test_a_distribution_of_nan_is_drawn_like_any_other():
    layout = layout_of((40,), [Shard(0)], (2,), (1,))
    local = fill_(torch.empty(20), Normal(float("nan")), layout)
    assert local.isnan().all()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(3, 7), (7, 1), (2, 3)])
@pytest.mark.parametrize("order", [None, (1, 0)])
def test_complex_normals_are_those_of_one_device(dtype, shape, order):
    normal = Normal(1.0, 2.0)
    torch.manual_seed(1)
    expected = strided(shape, order, dtype).normal_(1.0, 2.0)
    after = torch.get_rng_state()
    for rank in range(3):
        for dim in (0, 1):
            layout = layout_of(shape, [Shard(dim)], (3,), (rank,), memory_order=order)
            torch.manual_seed(1)
            local = fill_(strided(layout.local_shape, order, dtype), normal, layout)
            for slices, view in boxes_of(local, layout):
                assert torch.equal(view, expected[slices])
            assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(1)
    skip(normal, shape, dtype, memory_order=order)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("policy", ["native", "portable"])
@pytest.mark.parametrize("kind", [Bernoulli, Exponential, Geometric])
def test_a_parameter_in_half_precision_is_a_number_like_any_other(kind, policy):
    found = []
    for value in (numpy.float16(0.3), torch.tensor(0.3, dtype=torch.float16), 0.300048828125):
        torch.manual_seed(1)
        with use(policy):
            found.append(fill_(torch.empty(50), kind(value), whole((50,))))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])
