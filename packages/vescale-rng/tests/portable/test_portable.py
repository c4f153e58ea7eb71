"""Property: under the portable policy any pieces, put together, are the whole, on every rank.

Each op takes two words of the generator, also where a rank holds nothing, so that whatever governs
the generator governs the numbers.
"""

import _thread
import threading
from dataclasses import replace
from math import prod
from queue import SimpleQueue

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from portable_cases import EVERY, KEY, as_signed, same
from rng_cases import cases, draws
from rng_pieces import Shard, boxes_of, strided
from torch.utils.checkpoint import checkpoint
from vescale_rng import (
    DistributionError,
    Normal,
    PolicyError,
    RandInt,
    Uniform,
    _portable,
    dropout,
    fill_,
    layout_of,
    poisson,
    policy,
    rand,
    randn,
    use,
    whole,
)
from vescale_rng._portable import fill_boxes as _run
from vescale_rng.streams import advance, skip
from vescale_rng.streams import draws as words_of


def check(case, distribution, dtype, warmup):
    """Fill all shards, compare them and the generators with the whole on one device."""
    one = torch.Generator().manual_seed(1234)
    torch.empty(warmup).normal_(generator=one)
    before = one.get_state()
    expected = strided(case.shape, case.order, dtype)
    with use("portable"):
        fill_(expected, distribution, whole(case.shape, case.order), one)
        for coordinate in case.coordinates():
            layout = case.layout(coordinate)
            generator = torch.Generator()
            generator.set_state(before)
            local = strided(layout.local_shape, case.order, dtype)
            assert fill_(local, distribution, layout, generator) is local
            for slices, view in boxes_of(local, layout):
                assert same(view, expected[slices])
            assert torch.equal(generator.get_state(), one.get_state())
        assert words_of(distribution, case.shape, dtype) == 2 * bool(prod(case.shape))
    moved = torch.Generator()
    moved.set_state(before)
    advance(2 * bool(prod(case.shape)), moved)
    assert torch.equal(moved.get_state(), one.get_state())


@given(cases(), draws(), st.integers(0, 3))
def test_shards_are_those_of_one_device(case, draw, warmup):
    check(case, *draw, warmup)


@given(cases(), draws(), st.integers(1, 40))
def test_small_tiles_change_nothing(case, draw, blocks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_run, "_CPU_BLOCKS", blocks)
        check(case, *draw, 0)


@given(cases(most=600), draws(), st.integers(1, 1 << 20))
def test_torch_fills_boxes_as_numpy_does(case, draw, blocks):
    distribution, dtype = draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_run, "_DEVICE_BLOCKS", blocks)
        for coordinate in list(case.coordinates())[:4]:
            layout = case.layout(coordinate)
            locals_ = [strided(layout.local_shape, case.order, dtype) for _ in "12"]
            _portable.fill_portable(locals_[0], distribution, layout, KEY)
            _portable.fill_portable(locals_[1], distribution, layout, as_signed(KEY))
            assert same(*locals_)


@pytest.mark.parametrize(("distribution", "dtype"), EVERY)
def test_a_long_tensor_is_its_halves(distribution, dtype):
    # Longer than one tile, and cut at an odd place.
    numel, at = 50_001, 33_333
    expected = torch.empty(numel, dtype=dtype)
    _portable.fill_portable(expected, distribution, whole((numel,)), KEY)
    for begin, end in ((0, at), (at, numel)):
        layout = whole((numel,))
        box = replace(layout.boxes[0], global_offset=(begin,), shape=(end - begin,))
        local = torch.empty(end - begin, dtype=dtype)
        _portable.fill_portable(local, distribution, replace(layout, boxes=(box,)), KEY)
        assert same(local, expected[begin:end])


def test_a_piece_of_a_tensor_of_petabytes():
    # Places beyond 2**34 reach the counter's second word.
    shape = (1 << 24, 1 << 24)
    for place in ((0, 5), ((1 << 24) - 1, (1 << 24) - 3), (12345, 67890)):
        coordinates = [layout_of(shape, [Shard(0), Shard(1)], shape, place)]
        local = torch.empty(1, 1)
        _portable.fill_portable(local, RandInt(0, 2**20), coordinates[0], KEY)
        row = layout_of(shape, [Shard(0)], (1 << 24,), place[:1])
        box = replace(row.boxes[0], global_offset=(place[0], place[1] - 2), shape=(1, 3))
        around = torch.empty(1, 3)
        _portable.fill_portable(around, RandInt(0, 2**20), replace(row, boxes=(box,)), KEY)
        assert around[0, 2] == local[0, 0]


def test_the_key_is_what_torch_draws_over_all_of_int64():
    drawn = torch.empty(1, dtype=torch.int64)
    drawn.random_(-(1 << 63), None, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    with use("portable"):
        numbers = fill_(torch.empty(9), Normal(), whole((9,)), generator)
    expected = torch.empty(9)
    _portable.fill_portable(expected, Normal(), whole((9,)), int(drawn) % (1 << 64))
    assert same(numbers, expected)


def test_seeds_forks_and_states_govern_it():
    layout = whole((40,))
    with use("portable"), torch.random.fork_rng([]):
        torch.manual_seed(7)
        state = torch.get_rng_state()
        first, second = rand(layout), rand(layout)
        assert not torch.equal(first, second)
        torch.manual_seed(7)
        assert torch.equal(rand(layout), first)
        with torch.random.fork_rng([]):
            rand(layout)
        assert torch.equal(rand(layout), second)
        torch.set_rng_state(state)
        assert torch.equal(rand(layout), first)
        torch.manual_seed(7)
        skip(Uniform(), (3, 3))
        assert torch.equal(rand(layout), second)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_dropout_drops_the_same_again(reentrant):
    x = torch.ones(60, requires_grad=True)
    layout = whole((60,))
    with use("portable"), torch.random.fork_rng([]):
        torch.manual_seed(1)
        y = checkpoint(lambda x: dropout(x * 1, 0.5, layout), x, use_reentrant=reentrant)
        randn(layout)
        y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert 0 < y.count_nonzero() < 60


def test_dropout_of_shards_and_its_gradient():
    with use("portable"), torch.random.fork_rng([]):
        torch.manual_seed(5)
        given_ = torch.randn(7, 9)
        state = torch.get_rng_state()
        expected = dropout(given_, 0.4, whole((7, 9)))
        for index in range(3):
            layout = layout_of((7, 9), [Shard(1)], (3,), (index,))
            torch.set_rng_state(state)
            local = given_[:, 3 * index : 3 * index + 3].clone().requires_grad_()
            found = dropout(local, 0.4, layout)
            assert torch.equal(found, expected[:, 3 * index : 3 * index + 3])
            found.sum().backward()
            assert torch.equal(local.grad, (found != 0) * torch.tensor(1.0).div(0.6))


def policy_of_a_foreign_thread():
    """The policy that a thread finds which Python did not start."""
    found = SimpleQueue()
    _thread.start_new_thread(lambda: found.put(policy()), ())
    return found.get(timeout=30)


def test_a_thread_that_python_did_not_start_draws_as_the_open_block():
    assert policy_of_a_foreign_thread() == "native"
    with use("portable"):
        assert policy_of_a_foreign_thread() == "portable"
    assert policy_of_a_foreign_thread() == "native"
    with use("native"), use("portable"):
        with use("native"):
            pass
        # Also after a block of an outer policy.
        assert policy_of_a_foreign_thread() == "portable"


def test_another_thread_of_python_is_not_drawn_in():
    with use("portable"):
        found = []
        thread = threading.Thread(target=lambda: found.append(policy()))
        thread.start()
        thread.join()
    assert found == ["native"]


def test_what_is_not_drawn_is_refused_before_a_key_is():
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    with use("portable"):
        with pytest.raises(PolicyError, match='use\\("native"\\)'):
            poisson(torch.ones(3), whole((3,)), generator)
        with pytest.raises(PolicyError, match="view_as_real"):
            fill_(torch.empty(3, dtype=torch.complex64), Uniform(), whole((3,)), generator)
        with pytest.raises(DistributionError, match="cannot be drawn"):
            fill_(torch.empty(3, dtype=torch.int32), Normal(), whole((3,)), generator)
        with pytest.raises(DistributionError, match="cannot be drawn"):
            fill_(torch.empty(3), Normal(0.0, -1.0), whole((3,)), generator)
    assert torch.equal(generator.get_state(), before)


def test_an_unknown_policy_is_refused():
    with pytest.raises(PolicyError, match='"native" and "portable"'), use("philox"):
        pass
    assert policy() == "native"
