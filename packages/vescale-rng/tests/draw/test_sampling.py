"""Property: permutations and samples of categories are those of one device."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rng_cases import Case, cases, cut
from rng_pieces import Replicate, Shard, strided
from vescale_rng import (
    DistributionError,
    LayoutError,
    binomial,
    layout_of,
    multinomial,
    poisson,
    randperm,
    rrelu,
    whole,
)
from vescale_rng.streams import Multinomial, RandPerm, draws, position


@st.composite
def rows(draw):
    """Rows of categories, of which only the rows are sharded."""
    shape = (draw(st.integers(0, 30)), draw(st.integers(1, 12)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kind = st.builds(Shard, st.just(0), st.sampled_from((1, 1, 2, 3))) | st.just(Replicate())
    order = draw(st.sampled_from((None, (1, 0))))
    return Case(shape, order, mesh, tuple(draw(kind) for _ in mesh), draw(st.booleans()))


@given(rows(), st.integers(1, 5), st.booleans(), st.sampled_from((torch.float32, torch.float64)))
def test_multinomial(case, samples, replacement, dtype):
    if not replacement:
        samples = min(samples, case.shape[1])
    torch.manual_seed(4)
    p = strided(case.shape, case.order, dtype).uniform_()
    p[:, 0] += 0.1  # never a row of zeros
    p[:, 1:][p[:, 1:] < 0.3] = 0
    before = torch.get_rng_state()
    if case.shape[0]:
        expected = torch.multinomial(p, samples, replacement)
    else:
        expected = torch.empty(0, samples, dtype=torch.int64)
    after = torch.get_rng_state()
    words = draws(Multinomial(samples, replacement), case.shape, dtype)
    torch.set_rng_state(before)
    assert position().after(words).words == _at(after).words
    for coordinate in case.coordinates():
        layout = case.layout(coordinate)
        torch.set_rng_state(before)
        found = multinomial(cut(p, layout, case.order), samples, replacement, layout=layout)
        held = layout_of((case.shape[0], samples), case.placements, case.mesh, coordinate)
        assert torch.equal(found, cut(expected, held, None))
        assert torch.equal(torch.get_rng_state(), after)


def _at(state):
    torch.set_rng_state(state)
    return position()


@pytest.mark.parametrize("replacement", [False, True])
def test_one_row(replacement):
    p = torch.tensor([0.1, 0.0, 3.0, 2.0])
    torch.manual_seed(4)
    expected = torch.multinomial(p, 2, replacement)
    torch.manual_seed(4)
    assert torch.equal(multinomial(p, 2, replacement, layout=whole((4,))), expected)


@given(cases(), st.sampled_from((torch.int64, torch.int32)))
def test_randperm(case, dtype):
    n = case.shape[0] if case.shape else 5
    placements = tuple(Shard(0, p.blocks) if isinstance(p, Shard) else p for p in case.placements)
    torch.manual_seed(8)
    before, start = torch.get_rng_state(), position()
    expected = torch.randperm(n, dtype=dtype)
    after = torch.get_rng_state()
    assert start.after(draws(RandPerm(), (n,))) == position()
    for coordinate in case.coordinates():
        layout = layout_of((n,), placements, case.mesh, coordinate)
        torch.set_rng_state(before)
        assert torch.equal(randperm(n, layout, dtype=dtype), cut(expected, layout, None))
        assert torch.equal(torch.get_rng_state(), after)


def test_what_depends_on_values_is_drawn_whole():
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    count = torch.full((6, 5), 9.0)
    for ours, torchs in (
        (lambda: poisson(x.abs() * 20, whole((6, 5))), lambda: torch.poisson(x.abs() * 20)),
        (
            lambda: binomial(count, x.sigmoid(), whole((6, 5))),
            lambda: torch.binomial(count, x.sigmoid()),
        ),
        (
            lambda: rrelu(x, whole((6, 5)), 0.1, 0.4),
            lambda: torch.nn.functional.rrelu(x, 0.1, 0.4, training=True),
        ),
    ):
        torch.manual_seed(3)
        expected = torchs()
        after = torch.get_rng_state()
        torch.manual_seed(3)
        assert torch.equal(ours(), expected)
        assert torch.equal(torch.get_rng_state(), after)


def test_a_given_generator_is_used():
    x = torch.randn(40, generator=torch.Generator().manual_seed(1))
    one, other = (torch.Generator().manual_seed(4) for _ in range(2))
    found = rrelu(x, whole((40,)), 0.1, 0.4, one)
    expected = torch.rrelu(x, 0.1, 0.4, True, generator=other)
    assert torch.equal(found, expected)


def test_what_depends_on_values_is_refused_for_a_piece():
    layout = layout_of((6, 5), [Shard(0)], (2,), (0,))
    part = torch.ones(3, 5)
    before = torch.get_rng_state()
    for call in (
        lambda: poisson(part, layout),
        lambda: binomial(part, part, layout),
        lambda: rrelu(part, layout),
    ):
        with pytest.raises(LayoutError, match="15 of 30 elements"):
            call()
    assert torch.equal(torch.get_rng_state(), before)


def test_refusals():
    columns = layout_of((4, 6), [Shard(1)], (2,), (0,))
    with pytest.raises(LayoutError, match="whole rows of 6"):
        multinomial(torch.ones(4, 3), 1, layout=columns)
    with pytest.raises(LayoutError, match="one or two dims"):
        multinomial(torch.ones(2, 2, 2), 1, layout=whole((2, 2, 2)))
    with pytest.raises(DistributionError, match="not so many"):
        multinomial(torch.ones(2, 3), 4, layout=whole((2, 3)))
    with pytest.raises(DistributionError, match="torch says"):
        multinomial(-torch.ones(2, 3), 1, layout=whole((2, 3)))
    with pytest.raises(LayoutError, match=r"shape \(5,\)"):
        randperm(5, whole((6,)))
    with pytest.raises(DistributionError, match=r"`n`: .* got n=-1"):
        randperm(-1)
    with pytest.raises(DistributionError, match="torch says"):
        randperm(300, dtype=torch.uint8)


def test_a_permutation_too_long_for_words_of_32_bits_takes_two_for_each_place():
    # What `torch.randperm` moves its generator by; compared by hand, as it takes gigabytes.
    words = [draws(RandPerm(), (n,), torch.int64) for n in (214_748_363, 214_748_364)]
    assert words == [214_748_362, 2 * 214_748_364]
