"""Property: what is no distribution of one tensor is cut into pieces as freely, portably.

Truncated normals, probabilities by element, permutations and samples: each takes one key, and a
piece holds what the whole holds there, whatever computes it.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from portable_cases import KEY, as_signed, same
from rng_cases import cases
from rng_pieces import FLOATS, Shard, boxes_of, strided
from vescale_rng import (
    Exponential,
    _portable,
    bernoulli_,
    fill_,
    gumbel_like,
    layout_of,
    multinomial,
    randperm,
    trunc_normal_,
    use,
    whole,
)
from vescale_rng._cpu.rejection import Bounds
from vescale_rng._portable import fill_boxes as _run
from vescale_rng._portable import sampling as _sampling
from vescale_rng.streams import Multinomial, position

# Nearly all accepted; half of them; a tail and a narrow interval, from uniform candidates.
BOUNDS = [
    Bounds(0.0, 0.02, -2.0, 2.0),
    Bounds(0.5, 1.0, 0.0, 1.5),
    Bounds(0.0, 1.0, 1.5, 4.0),
    Bounds(1.0, 2.0, 1.1, 1.2),
]


@given(cases(most=800), st.sampled_from(BOUNDS), st.sampled_from(FLOATS), st.integers(1, 200))
def test_truncated_normals_of_shards(case, bounds, dtype, blocks):
    expected = strided(case.shape, case.order, dtype)
    _portable.truncated_normal(expected, bounds, whole(case.shape, case.order), KEY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_run, "_CPU_BLOCKS", blocks)
        for coordinate in case.coordinates():
            layout = case.layout(coordinate)
            local = strided(layout.local_shape, case.order, dtype)
            _portable.truncated_normal(local, bounds, layout, KEY)
            for slices, view in boxes_of(local, layout):
                assert same(view, expected[slices])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_truncated_normals_by_torch_and_their_distribution(bounds, dtype):
    found = [torch.empty(50_000, dtype=dtype) for _ in "12"]
    for local, key in zip(found, (KEY, as_signed(KEY)), strict=True):
        _portable.truncated_normal(local, bounds, whole((50_000,)), key)
    assert same(*found)
    low, high = (torch.tensor(bound, dtype=dtype) for bound in bounds[2:])
    assert bool(((found[0] >= low) & (found[0] <= high)).all())
    if dtype in (torch.float32, torch.float64):
        x = np.sort(found[0].double().numpy())
        steps = (np.array([bounds.low, bounds.high, *x]) - bounds.mean) / bounds.std
        law = 0.5 * torch.erfc(torch.from_numpy(-steps / 2**0.5)).numpy()
        law = (law[2:] - law[0]) / (law[1] - law[0])
        places = (np.arange(len(x)) + 0.5) / len(x)
        assert np.abs(law - places).max() < 2.7 / len(x) ** 0.5


@given(cases(most=800), st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
def test_probabilities_by_element(case, dtype):
    p = strided(case.shape, case.order, dtype)
    p.copy_(torch.rand(case.shape, generator=torch.Generator().manual_seed(1)))
    expected = strided(case.shape, case.order, torch.bool)
    _portable.bernoulli_of(expected, p, whole(case.shape, case.order), KEY)
    with use("portable"):
        for coordinate in case.coordinates():
            layout = case.layout(coordinate)
            local, mine, theirs = (
                strided(layout.local_shape, case.order, kind)
                for kind in (torch.bool, dtype, torch.bool)
            )
            for slices, view in boxes_of(mine, layout):
                view.copy_(p[slices])
            _portable.bernoulli_of(local, mine, layout, KEY)
            _portable.bernoulli_of(theirs, mine, layout, as_signed(KEY))
            assert torch.equal(local, theirs)
            for slices, view in boxes_of(local, layout):
                assert torch.equal(view, expected[slices])


def test_one_probability_and_equal_ones_are_the_same():
    layout = whole((5000,))
    with use("portable"):
        one, each = (
            bernoulli_(torch.empty(5000), p, layout, torch.Generator().manual_seed(3))
            for p in (0.3, torch.full((5000,), 0.3, dtype=torch.float64))
        )
    assert torch.equal(one, each)
    assert abs(one.mean() - 0.3) < 0.03


def test_a_permutation_and_its_pieces():
    with use("portable"):
        generator = torch.Generator().manual_seed(3)
        before = position(generator)
        order = randperm(1001, generator=generator)
        assert position(generator) == before.after(2)
        assert torch.equal(order.sort().values, torch.arange(1001))
        for index in range(3):
            layout = layout_of((1001,), [Shard(0)], (3,), (index,))
            piece = randperm(1001, layout, generator=torch.Generator().manual_seed(3))
            assert torch.equal(piece, order.chunk(3)[index])
        assert randperm(0, generator=generator).shape == (0,)
        assert position(generator) == before.after(2)
    theirs = _portable.permutation(1001, as_signed(KEY), torch.device("cpu"))
    assert torch.equal(theirs, _portable.permutation(1001, KEY, torch.device("cpu")))


def test_permutations_are_even():
    places = torch.stack(
        [_portable.permutation(4, key, torch.device("cpu")) for key in range(6000)]
    )
    counts = torch.stack([torch.bincount(column, minlength=4) for column in places.T])
    assert (counts - 1500).abs().max() < 5 * 1500**0.5


@pytest.mark.parametrize("at_once", [1, 7, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "replacement"), [(1, False), (5, False), (5, True), (1, True)])
def test_samples_of_rows(count, replacement, dtype, at_once):
    weights = torch.rand(11, 6, dtype=dtype, generator=torch.Generator().manual_seed(1))
    op = Multinomial(count, replacement)
    expected = _portable.winners(weights, op, whole((11, 6)), KEY)
    assert torch.equal(_portable.winners(weights, op, whole((11, 6)), as_signed(KEY)), expected)
    with pytest.MonkeyPatch.context() as patch, use("portable"):
        patch.setattr(_sampling, "_RACES", at_once)
        sampled = []
        for index in range(4):
            layout = layout_of((11, 6), [Shard(0)], (4,), (index,))
            rows = weights.chunk(4)[index]
            assert torch.equal(_portable.winners(rows, op, layout, KEY), expected[3 * index :][:3])
            generator = torch.Generator().manual_seed(8)
            sampled.append(
                multinomial(rows, count, replacement, layout=layout, generator=generator)
            )
            assert position(generator) == position(torch.Generator().manual_seed(8)).after(2)
        generator = torch.Generator().manual_seed(8)
        together = multinomial(
            weights, count, replacement, layout=whole((11, 6)), generator=generator
        )
    assert torch.equal(torch.cat(sampled), together)
    if not replacement:
        assert all(len(set(row)) == count for row in expected.tolist())


def test_samples_have_their_weights():
    weights = torch.tensor([[1.0, 2.0, 0.0, 5.0]])
    drawn = _portable.winners(weights, Multinomial(40_000, True), whole((1, 4)), KEY)[0]
    shares = torch.bincount(drawn, minlength=4) / 40_000
    assert (shares - weights[0] / 8).abs().max() < 5 / 40_000**0.5
    assert shares[2] == 0


@pytest.mark.parametrize(
    ("dtype", "unit"), [(torch.float32, 1e-42), (torch.float64, 5e-323), (torch.float16, 1e-6)]
)
def test_tiny_weights_are_weights(dtype, unit):
    weights = torch.tensor([[0.0, 4.0, 0.0, 8.0]], dtype=torch.float64).mul(unit).to(dtype)
    drawn = _portable.winners(weights, Multinomial(4_000, True), whole((1, 4)), KEY)[0]
    shares = torch.bincount(drawn, minlength=4) / 4_000
    assert not shares[::2].any()
    # Beyond float64, even times are not told apart.
    assert dtype is torch.float64 or (shares[1] - 1 / 3).abs() < 5 / 4_000**0.5
    row = torch.tensor([[1.0, 0.0, unit, 0.0]], dtype=dtype)
    assert _portable.winners(
        row, Multinomial(2, False), whole((1, 4)), KEY
    ).sort().values.tolist() == [[0, 2]]


def test_a_row_of_one_dim_is_the_first_row():
    weights = torch.rand(6, generator=torch.Generator().manual_seed(1))
    with use("portable"):
        one, row = (
            multinomial(
                given, 3, layout=whole(given.shape), generator=torch.Generator().manual_seed(2)
            )
            for given in (weights, weights[None])
        )
    assert torch.equal(one, row[0])


def test_truncated_normals_take_one_key():
    with use("portable"):
        generator = torch.Generator().manual_seed(3)
        before = position(generator)
        trunc_normal_(torch.empty(100), 0.0, 1.0, -1.0, 1.0, generator, layout=whole((100,)))
    assert position(generator) == before.after(2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gumbel_noise_is_minus_the_logarithm_of_exponentials(dtype):
    with use("portable"):
        logits = torch.zeros(10, 30, dtype=dtype)
        layout = layout_of((10, 30), [Shard(1)], (3,), (1,))
        expected = gumbel_like(logits, whole((10, 30)), generator=torch.Generator().manual_seed(1))
        piece = gumbel_like(
            logits[:, 10:20].contiguous(), layout, generator=torch.Generator().manual_seed(1)
        )
    assert same(piece, expected[:, 10:20])
    times = torch.empty(10, 30, dtype=dtype)
    with use("portable"):
        fill_(times, Exponential(), whole((10, 30)), torch.Generator().manual_seed(1))
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        expected.double(), -times.double().log(), rtol=tolerance, atol=tolerance
    )
