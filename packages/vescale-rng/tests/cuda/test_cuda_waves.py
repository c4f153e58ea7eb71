"""Property: ATen called from shifted offsets gives the pieces of what it draws in one call.

A device of few threads, played in numpy, stands for the GPU: so small tensors have several waves.
"""

from math import prod

import pytest
import torch
from cuda_model import ModelDevice, kept
from cuda_shards import PLACE, dropped, global_draw, rank_draw, same
from hypothesis import given
from hypothesis import strategies as st
from rng_cases import cases
from rng_cases import draws as draw_kinds
from rng_pieces import FLOATS, Replicate, Shard, strided
from vescale_rng import DeviceError, DistributionError, Exponential, Normal, Uniform, layout_of
from vescale_rng._cuda import dropout_check, map_check
from vescale_rng._cuda import fill as cuda_fill
from vescale_rng._cuda.dropout_check import DropoutRoutes
from vescale_rng._cuda.map_check import Routes
from vescale_rng._cuda.thread_map import segments_of
from vescale_rng._cuda.waves import Waves
from vescale_rng._layout.fill_plan import plan_for


@pytest.fixture(autouse=True)
def _without_triton(monkeypatch):
    for module in (map_check, dropout_check):
        monkeypatch.setattr(module, "have_triton", lambda: False)


DEVICE = ModelDevice(256)
ROUTES = Routes(DEVICE)
DROPOUT = DropoutRoutes(DEVICE)


@given(cases(most=12_000), draw_kinds())
def test_pieces_are_those_of_one_device(case, kind):
    distribution, dtype = kind
    expected, end = global_draw(DEVICE, distribution, case.shape, case.order, dtype)
    for coordinate in case.coordinates():
        layout = case.layout(coordinate)
        local, words = rank_draw(DEVICE, ROUTES, distribution, layout, case.order, dtype)
        assert same(local, layout, expected)
        assert PLACE.offset + words == end


@given(
    st.integers(1, 9000),
    st.sampled_from((1, 2**19, 2**20, 2**21)),
    st.sampled_from((torch.float32, torch.float64)),
    st.randoms(),
)
def test_any_ranges_in_any_order_also_across_launches(numel, itemsize, dtype, random):
    # The size of an element decides where launches are split, and the model is told another one.
    class Bytes(torch.Tensor):
        def element_size(self):
            return itemsize

    unroll = 2 if dtype == torch.float64 else 4
    expected = torch.empty(numel, dtype=dtype)
    end = DEVICE.draw(Uniform(), expected.as_subclass(Bytes), PLACE)
    segments = segments_of(numel, itemsize, 256 * unroll)
    assert end == PLACE.offset + segments.words

    def draw(out, words):
        DEVICE.draw(Uniform(), out, PLACE.after(words))

    room = Waves.room(700, 256 * unroll, numel)
    waves = Waves(draw, segments, 256 * unroll, torch.empty(room, dtype=dtype))
    for _ in range(8):
        start = random.randrange(numel)
        stop = random.randint(start + 1, min(numel, start + 700))
        assert torch.equal(waves.take(start, stop), expected[start:stop])


def test_a_rank_draws_only_the_waves_that_it_holds():
    layout = layout_of((200_000,), [Shard(0)], (8,), (5,))
    rank_draw(DEVICE, ROUTES, Normal(), layout, None, torch.float32)
    DEVICE.drawn = 0
    rank_draw(DEVICE, ROUTES, Normal(), layout, None, torch.float32)
    assert 25_000 <= DEVICE.drawn < 25_000 + 2 * 1024


def test_a_rank_that_holds_nothing_draws_nothing_and_moves_as_far():
    empty, full = (layout_of((3, 700), [Shard(0)], (4,), (rank,)) for rank in (3, 0))
    _, words = rank_draw(DEVICE, ROUTES, Normal(), full, None, torch.float32)
    DEVICE.drawn = 0
    assert rank_draw(DEVICE, ROUTES, Normal(), empty, None, torch.float32)[1] == words
    assert DEVICE.drawn == 0


@given(cases(most=12_000), st.sampled_from(FLOATS), st.sampled_from((0.1, 0.5, 0.9, 1 / 3)))
def test_masks_of_dropout_are_those_of_one_device(case, dtype, p):
    if not prod(case.shape):
        return
    x = strided(case.shape, case.order, dtype)
    flat, end = kept(x, p, 16 // x.element_size(), 256, PLACE.seed, PLACE.offset)
    expected = torch.empty_like(x, dtype=torch.bool)
    expected.as_strided((x.numel(),), (1,)).copy_(flat)
    for coordinate in case.coordinates():
        layout = case.layout(coordinate)
        mask, words = dropped(DEVICE, DROPOUT, layout, case.order, dtype, p)
        assert same(mask, layout, expected)
        assert PLACE.offset + words == end


def test_a_device_that_draws_by_another_map_is_an_error_never_other_numbers():
    class Other(ModelDevice):
        def draw(self, distribution, out, place):
            end = super().draw(distribution, out, place)
            # Beyond the first turn everything lies one further.
            out[1024:] = out[1024:].roll(1)
            return end

    with pytest.raises(DeviceError, match="by the map"):
        Routes(Other(256)).route(Normal(), torch.float32)


def test_a_device_that_moves_its_generator_otherwise_is_an_error():
    class Other(ModelDevice):
        def draw(self, distribution, out, place):
            return super().draw(distribution, out, place) + 4

    with pytest.raises(DeviceError, match="by the map"):
        Routes(Other(256)).route(Uniform(), torch.float32)


def test_another_dropout_is_an_error():
    class Other(ModelDevice):
        def dropout(self, given, p, place):
            return super().dropout(given, p, place.after(4))

    with pytest.raises(DeviceError, match="by the map"):
        DropoutRoutes(Other(256)).route(torch.float32)


def test_the_width_of_vectors_is_found_out():
    class Narrow(ModelDevice):
        def dropout(self, given, p, place):
            mask, _ = kept(given, p, 2, self.threads, place.seed, place.offset)
            return mask.view(given.shape)

    assert DropoutRoutes(Narrow(256)).route(torch.bfloat16)[0] == 2
    assert DropoutRoutes(DEVICE).route(torch.bfloat16)[0] == 8
    assert DropoutRoutes(DEVICE).route(torch.float64)[0] == 2


def test_what_torch_refuses_is_refused():
    class Refusing(ModelDevice):
        def draw(self, distribution, out, place):
            raise RuntimeError("exponential_ expects lambda > 0.0")

    with pytest.raises(DistributionError, match="lambda"):
        Routes(Refusing(256)).route(Exponential(-1.0), torch.float32)


def test_the_numbers_of_another_model_need_the_kernel():
    layout = layout_of((5000,), [Replicate()], (2,), (1,))
    local = torch.empty(5000)
    plan = plan_for(layout, local)
    with pytest.raises(DeviceError, match="cannot draw the numbers of a GPU with 512"):
        cuda_fill.fill_from(plan, Normal(), local, PLACE, ROUTES, DEVICE, 512)
