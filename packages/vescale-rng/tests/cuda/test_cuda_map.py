"""Property: the numbers of a CUDA device, and where they leave its generator, follow from the map.

The numpy model of ATen's launches is compared with numbers that others have printed on GPUs, and
the closed formulas of the package with the model.
"""

from math import prod

import numpy as np
import pytest
import torch
from cuda_model import ModelDevice, blocks, launches, nullary, transform
from hypothesis import given
from hypothesis import strategies as st
from rng_cases import cases
from rng_pieces import boxes_of, strided
from vescale_rng import Box, DistributionError, Normal, RandInt, ShardLayout, Uniform
from vescale_rng._cuda.generator_state import CudaPosition
from vescale_rng._cuda.recipes import recipe_of
from vescale_rng._cuda.spans import DIMS, spans_of
from vescale_rng._cuda.thread_map import increment, segments_of, threads_of_processors
from vescale_rng._distributions import Distribution

H100 = threads_of_processors(132, 2048)
A100 = threads_of_processors(108, 2048)

# torch.manual_seed(0); torch.rand(10, device="cuda") twice, as printed by many; and
# pytorch/pytorch issue 158398 (seed 42).
PUBLISHED = [
    (Uniform(), 0, 0, "0.3990 0.5167 0.0249 0.9401 0.9459 0.7967 0.4150 0.8203 0.2290 0.9096"),
    (Uniform(), 0, 4, "0.9722 0.7910 0.4690 0.3300 0.3345 0.3783 0.7640 0.6405 0.1103 0.3594"),
    (Normal(), 42, 0, "0.1940 2.1614 -0.1721 0.8491 -1.9244"),
]


@pytest.mark.parametrize(("distribution", "seed", "offset", "printed"), PUBLISHED)
def test_the_first_numbers_are_those_that_others_have_printed(distribution, seed, offset, printed):
    expected = [float(number) for number in printed.split()]
    found = torch.empty(len(expected))
    ModelDevice(H100).draw(distribution, found, CudaPosition(seed, offset))
    assert [round(x, 4) for x in found.tolist()] == expected


def element(distribution, dtype, seed, offset, threads, index):
    """One element by the closed formula."""
    unroll, words_of = transform(distribution, dtype)
    turn, rest = divmod(index, threads * unroll)
    lane, thread = divmod(rest, threads)
    return words_of(blocks(seed, offset + 4 * turn, np.array([thread])))[0, lane].item()


# pytorch/pytorch issue 143086: torch.randn(1, 49 * 12 * 112 * 144) of seed 1 on two models, ten
# turns deep; and issue 158398: torch.randn(1, 64, 2048) of seed 42 on a third.
LARGE = 49 * 12 * 112 * 144
PRINTED = [
    (H100, 1, {0: -0.2963, 1: 2.6764, LARGE - 3: -0.6970, LARGE - 2: -0.7780, LARGE - 1: 0.3267}),
    (A100, 1, {0: -0.2963, 1: 2.6764, LARGE - 3: 0.1549, LARGE - 2: -0.6797, LARGE - 1: -0.1656}),
    (
        threads_of_processors(28, 1536),
        42,
        {2046: -2.7733, 2048: -0.4574, 61 * 2048 + 2: 1.0578, 131070: 1.2850, 131071: -0.0282},
    ),
]


@pytest.mark.parametrize(("threads", "seed", "printed"), PRINTED)
def test_large_tensors_are_those_that_others_have_printed_on_each_model(threads, seed, printed):
    for index, value in printed.items():
        found = element(Normal(), torch.float32, seed, 0, threads, index)
        assert round(found, 4) == value


@given(
    st.integers(1, 9).map(lambda n: 256 * n),
    st.integers(1, 40_000),
    st.sampled_from([(Uniform(), torch.float32), (Uniform(), torch.float64)]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**34).map(lambda n: 4 * n),
    st.randoms(),
)
def test_an_element_follows_from_its_index_alone(threads, numel, kind, seed, offset, random):
    distribution, dtype = kind
    out = torch.empty(numel, dtype=dtype)
    end = ModelDevice(threads).draw(distribution, out, CudaPosition(seed, offset))
    for index in {0, numel - 1, *(random.randrange(numel) for _ in range(8))}:
        assert out[index].item() == element(distribution, dtype, seed, offset, threads, index)
    assert end - offset == increment(numel, threads * recipe_of(distribution, dtype).unroll)


LIMIT = 2**31


@given(
    st.integers(1, 4000) | st.integers(LIMIT // 8 - 9, LIMIT * 3),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((2, 4)),
)
def test_launches_are_split_as_the_device_splits_them(numel, itemsize, unroll):
    threads = 512 * 2048
    *expected, (_, end) = launches(numel, itemsize, unroll, threads, 0)
    found = segments_of(numel, itemsize, threads * unroll)
    assert [(part.stop - part.start, part.words) for part in found.parts] == expected
    assert found.words == end
    assert [part.start for part in found.parts[1:]] == [part.stop for part in found.parts[:-1]]
    assert found.parts[0].start == 0
    assert found.parts[-1].stop == numel


def test_the_models_own_split_is_that_of_its_launches():
    # Bytes that 32 bits cannot index, without the memory: a huge size of an element will do.
    seed, itemsize, most = 3, 2**21, 256
    values, end = nullary(
        3000, itemsize, 4, most, seed, 0, lambda words: torch.from_numpy(words.astype(np.int64))
    )
    parts = segments_of(3000, itemsize, 4 * most)
    assert [len(value) for value in values] == [p.stop - p.start for p in parts.parts]
    assert end == parts.words
    for value, part in zip(values, parts.parts, strict=True):
        assert value[0].item() == blocks(seed, part.words, np.array([0]))[0, 0]


@given(cases(), st.booleans())
def test_spans_are_the_boxes(case, row_major):
    order = None if row_major else case.order
    numbers = torch.arange(prod(case.shape))
    whole = strided(case.shape, order, torch.int64)
    if numbers.numel():
        whole.as_strided((numbers.numel(),), (1,)).copy_(numbers)
    for coordinate in case.coordinates():
        layout = case.layout(coordinate)
        local = strided(layout.local_shape, case.order, torch.int64).fill_(-1)
        for span in spans_of(layout, order):
            assert len(span.shape) == len(span.global_strides) == len(span.local_strides) == DIMS
            there = numbers.as_strided(span.shape, span.global_strides, span.first)
            assert there.max() == span.stop - 1
            assert there.numel() == span.count
            here = local.as_strided(span.shape, span.local_strides, span.local_first)
            assert (here == -1).all()
            here.copy_(there)
        for slices, view in boxes_of(local, layout):
            assert torch.equal(view, whole[slices])


def test_a_box_of_many_dims_is_cut():
    shape = (3,) * 6
    whole = torch.arange(3**6).reshape(shape)
    cut = whole[::1, 1:, :2, 1:, :2, 1:]
    box = Box((0, 1, 0, 1, 0, 1), tuple(cut.shape), 0, cut.contiguous().stride())
    local = torch.full((cut.numel(),), -1)
    for span in spans_of(ShardLayout(shape, (box,)), None):
        there = whole.as_strided(span.shape, span.global_strides, span.first)
        local.as_strided(span.shape, span.local_strides, span.local_first).copy_(there)
    assert torch.equal(local.view(cut.shape), cut)


def test_what_is_not_drawn_element_by_element_is_refused():
    class Other(Distribution):
        def draw(self, out, generator):
            pass

    with pytest.raises(DistributionError, match="element by element"):
        recipe_of(Other(), torch.float32)


@pytest.mark.parametrize(
    ("low", "high", "dtype", "unroll", "kernel"),
    [
        (0, 2**28 - 1, torch.int64, 4, True),
        (0, 2**28, torch.int64, 2, True),
        (-(2**63), None, torch.int64, 2, False),
        (-5, None, torch.int64, 2, True),
        (0, None, torch.uint8, 4, True),
        (0, 2**24, torch.float32, 4, True),
        (0, 2**26, torch.float32, 4, False),
        (0, 255, torch.bfloat16, 4, True),
        (0, 1000, torch.bfloat16, 4, False),
        (0, 1000, torch.uint16, 4, False),
    ],
)
def test_integer_ranges_take_one_word_or_two(low, high, dtype, unroll, kernel):
    recipe = recipe_of(RandInt(low, high), dtype)
    assert (recipe.unroll, recipe.kind is not None) == (unroll, kernel)
