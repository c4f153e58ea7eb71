"""Property: the kernel gives, element by element, what the numpy model of the device gives.

Interpreted, numpy's functions stand in for the device's, so all is bitwise but the tangent, for
which numpy and the interpreter take different ways.
"""

import os
from importlib.util import find_spec
from math import prod

import pytest
import torch
from cuda_model import ModelDevice, each_of, kept
from cuda_shards import PLACE, dropped, each, global_draw, rank_draw, same
from hypothesis import given, settings
from hypothesis import strategies as st
from rng_cases import cases
from rng_cases import draws as draw_kinds
from rng_pieces import FLOATS, Shard, boxes_of, strided
from vescale_rng import (
    Bernoulli,
    Cauchy,
    Geometric,
    LogNormal,
    Normal,
    RandInt,
    Random,
    Uniform,
    layout_of,
    whole,
)
from vescale_rng._cuda import bernoulli as cuda_bernoulli
from vescale_rng._cuda import fill as native
from vescale_rng._cuda.bernoulli import BernoulliRoutes
from vescale_rng._cuda.dropout_check import DropoutRoutes
from vescale_rng._cuda.generator_state import CudaPosition
from vescale_rng._cuda.map_check import Route, Routes
from vescale_rng._cuda.recipes import recipe_of
from vescale_rng._cuda.spans import spans_of
from vescale_rng._cuda.thread_map import Segment
from vescale_rng._layout.fill_plan import plan_for
from vescale_rng.cuda import GraphGenerator

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(
        find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs triton and TRITON_INTERPRET=1: nox -s kernels_interpret",
    ),
]

DEVICE = ModelDevice(512)


class Kernels(Routes):
    """The kernel wherever there is one: what it gives is the question here."""

    def route(self, distribution, dtype):
        recipe = recipe_of(distribution, dtype)
        return Route(recipe, recipe.kind is not None, "there is no kernel for it")


KERNELS = Kernels(DEVICE)


def close(found, expected, distribution):
    """Whether two tensors are equal, or as close as tangents of two libraries are."""
    if isinstance(distribution, Cauchy):
        units = 64 * torch.finfo(found.dtype).eps
        # Beside the pole the tangent magnifies the last bit of its argument.
        near = (found - expected).abs() <= units * (1 + expected.abs().double() ** 2)
        return bool(near.all())
    return torch.equal(found, expected)


@given(cases(most=9000), draw_kinds(), st.integers(0, 2**64 - 1), st.integers(0, 2**33))
def test_pieces_are_those_of_one_device(case, kind, seed, offset):
    distribution, dtype = kind
    place = CudaPosition(seed, 4 * offset)
    expected, end = global_draw(DEVICE, distribution, case.shape, case.order, dtype, place)
    for coordinate in case.coordinates():
        layout = case.layout(coordinate)
        local, words = rank_draw(DEVICE, KERNELS, distribution, layout, case.order, dtype, place)
        found = strided(case.shape, case.order, dtype).copy_(expected)
        for slices, view in boxes_of(local, layout):
            found[slices] = view
        assert close(found, expected, distribution)
        assert place.offset + words == end


# 1, a block of threads and its neighbours, all threads and theirs, a turn and theirs, many turns.
SIZES = [1, 255, 256, 257, 511, 512, 513, 2047, 2048, 2049, 20 * 512 + 777]
PROBES = [
    (Uniform(-0.3, 1.7), torch.float32),
    (Uniform(-0.3, 1.7), torch.float64),
    (Uniform(-0.3, 1.7), torch.bfloat16),
    (Uniform(-0.3, 1.7), torch.float16),
    (Normal(0.1, 0.7), torch.float32),
    (Normal(0.1, 0.7), torch.float64),
    (LogNormal(0.1, 0.7), torch.float32),
    (Geometric(0.3), torch.int32),
    (Bernoulli(0.3), torch.bool),
    (Random(), torch.float64),
    (RandInt(-5, None), torch.int64),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("distribution", "dtype"), PROBES)
def test_every_size_around_a_boundary(distribution, dtype, size):
    expected, end = global_draw(DEVICE, distribution, (size,), None, dtype)
    local, words = rank_draw(DEVICE, KERNELS, distribution, whole((size,)), None, dtype)
    assert torch.equal(local, expected)
    assert PLACE.offset + words == end


@pytest.mark.parametrize(
    ("distribution", "dtype"), [(Normal(), torch.float32), (Uniform(), torch.bfloat16)]
)
def test_the_check_of_a_device_finds_its_kernel_right(distribution, dtype):
    assert Routes(DEVICE).route(distribution, dtype).kernel


def test_a_kernel_that_is_wrong_is_replaced_and_a_warning_says_so(monkeypatch):
    from vescale_rng._cuda.kernels import launch as _launch

    right = _launch.launch

    def wrong(job, local, span, part):
        right(job, local, span, part)
        # The last bit of one number in a million would be enough.
        local[700] += 2**-20

    monkeypatch.setattr(_launch, "launch", wrong)
    routes = Routes(DEVICE)
    with pytest.warns(UserWarning, match="does not give torch's bits"):
        assert not routes.route(Normal(), torch.float32).kernel
    # Said once, and the pieces are torch's own.
    layout = layout_of((5000,), [Shard(0)], (3,), (1,))
    expected, _ = global_draw(DEVICE, Normal(), (5000,), None, torch.float32)
    local, _ = rank_draw(DEVICE, routes, Normal(), layout, None, torch.float32)
    assert same(local, layout, expected)


def test_a_kernel_that_cannot_run_is_replaced(monkeypatch):
    from vescale_rng._cuda.kernels import launch as _launch

    def broken(*_):
        raise OSError("no compiler")

    monkeypatch.setattr(_launch, "launch", broken)
    with pytest.warns(UserWarning, match="OSError: no compiler"):
        assert not Routes(DEVICE).route(Uniform(), torch.float32).kernel


@given(cases(most=9000), st.sampled_from(FLOATS), st.sampled_from((0.1, 0.5, 0.9, 1 / 3)))
def test_masks_of_dropout_are_those_of_one_device(case, dtype, p):
    if not prod(case.shape):
        return
    x = strided(case.shape, case.order, dtype)
    flat, end = kept(x, p, 16 // x.element_size(), 512, PLACE.seed, PLACE.offset)
    expected = torch.empty_like(x, dtype=torch.bool)
    expected.as_strided((x.numel(),), (1,)).copy_(flat)
    routes = DropoutRoutes(DEVICE)
    routes._found[dtype] = (16 // x.element_size(), "")
    for coordinate in case.coordinates():
        layout = case.layout(coordinate)
        mask, words = dropped(DEVICE, routes, layout, case.order, dtype, p)
        assert same(mask, layout, expected)
        assert PLACE.offset + words == end


def test_the_check_of_a_device_finds_dropout_right():
    assert DropoutRoutes(DEVICE).route(torch.float16) == (8, "")


@given(cases(most=9000, orders=False), st.sampled_from((torch.float32, torch.float64, torch.bool)))
@settings(max_examples=40)
def test_tensors_of_probabilities(case, dtype):
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    p = torch.linspace(0, 1, max(1, prod(case.shape)), dtype=kind)[: prod(case.shape)]
    p = p.view(case.shape)
    expected, _ = each_of(p, 512, PLACE.seed, PLACE.offset)
    expected = expected.view(case.shape).to(dtype)
    routes = BernoulliRoutes(DEVICE)
    for coordinate in case.coordinates():
        layout = case.layout(coordinate)
        mine = torch.empty(layout.local_shape, dtype=kind)
        for slices, view in boxes_of(mine, layout):
            view.copy_(p[slices])
        assert same(each(routes, mine, layout, dtype), layout, expected)


def test_seed_and_offset_are_read_from_memory():
    layout = layout_of((70, 90), [Shard(1)], (2,), (1,))
    seed, offset = torch.tensor([-5]), torch.tensor([4 * (2**32 - 1)])
    generator = GraphGenerator(seed, offset)
    assert generator.position() == CudaPosition(2**64 - 5, 4 * (2**32 - 1))
    local = torch.empty(layout.local_shape)
    plan = plan_for(layout, local)
    for turn in range(3):
        words = native.fill_from(plan, Normal(), local, generator, KERNELS, DEVICE, 512)
        place = CudaPosition(2**64 - 5, 4 * (2**32 - 1) + turn * words)
        expected, end = global_draw(DEVICE, Normal(), (70, 90), None, torch.float32, place)
        assert same(local, layout, expected)
        generator.offset.add_(words)
        assert generator.position().offset == end


def test_autograd_sees_that_a_kernel_wrote():
    local = torch.zeros(600)
    before = local._version
    piece = whole((600,))
    native.fill_from(plan_for(piece, local), Normal(), local, PLACE, KERNELS, DEVICE, 512)
    assert local._version > before
    before = local._version
    routes = BernoulliRoutes(DEVICE)
    cuda_bernoulli.fill_each_from(plan_for(piece, local), torch.rand(600), local, PLACE, routes)
    assert local._version > before
    with torch.inference_mode():
        inside = torch.zeros(600)
        native.fill_from(plan_for(piece, inside), Normal(), inside, PLACE, KERNELS, DEVICE, 512)
    assert inside.any()


def test_the_numbers_of_another_model_are_drawn():
    layout = layout_of((5000,), [Shard(0)], (3,), (2,))
    other = ModelDevice(1280)
    local = torch.empty(layout.local_shape)
    words = native.fill_from(plan_for(layout, local), Normal(), local, PLACE, KERNELS, DEVICE, 1280)
    expected, end = global_draw(other, Normal(), (5000,), None, torch.float32)
    assert same(local, layout, expected)
    assert end == PLACE.offset + words


def test_places_beyond_32_bits():
    from vescale_rng._cuda.kernels.launch import Job, WordSource, launch

    # A tensor of 10**11 elements, of which this rank has a few rows of a few columns.
    shape = (2_000_000, 50_000)
    layout = layout_of(shape, [Shard(0), Shard(1)], (400_000, 10_000), (399_999, 9_999))
    (span,) = spans_of(layout, None)
    assert span.wide
    recipe = recipe_of(Uniform(), torch.float32)
    start = span.first - 3
    words = 4096
    job = Job(recipe, WordSource(7, 8), 512)
    local = torch.full(layout.local_shape, -1.0)
    launch(job, local, span, Segment(start, start + 2**31 - 1, words))
    for row in range(5):
        for column in range(5):
            index = (shape[0] - 5 + row) * shape[1] + shape[1] - 5 + column - start
            turn, rest = divmod(index, 2048)
            one = torch.empty(rest + 1)
            DEVICE.draw(Uniform(), one, CudaPosition(7, 8 + words + 4 * turn))
            assert local[row, column] == one[rest]


def test_elements_of_other_launches_are_left_alone():
    from vescale_rng._cuda.kernels.launch import Job, WordSource, launch

    local = torch.full((3000,), -1.0)
    (span,) = spans_of(whole((3000,)), None)
    job = Job(recipe_of(Uniform(), torch.float32), WordSource(7, 0), 512)
    launch(job, local, span, Segment(1000, 1900, 12))
    expected = torch.empty(900)
    DEVICE.draw(Uniform(), expected, CudaPosition(7, 12))
    assert torch.equal(local[1000:1900], expected)
    assert (local[:1000] == -1).all()
    assert (local[1900:] == -1).all()
