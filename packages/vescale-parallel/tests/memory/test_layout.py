"""A layout has no overlaps and is never below what lives at once; small ones are solved."""

import importlib.util
import random
import time

import pytest
from vescale_parallel import ParallelError
from vescale_parallel._memory.caching import CachingAllocator
from vescale_parallel._memory.highs import by_highs
from vescale_parallel._memory.layout import Block, checked_layout, laid_out, most_at_once
from vescale_parallel._memory.ordered import ordered
from vescale_parallel._memory.program import Operation, Storage, program

NO_SCIPY = importlib.util.find_spec("scipy") is None
needs_scipy = pytest.mark.skipif(NO_SCIPY, reason="scipy is not installed")


def blocks(seed: int, count: int) -> list[Block]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        first = draw.randrange(count)
        last = first + draw.randrange(1 + count // 3)
        found.append(Block(draw.choice([0, 64, 128, 640, 6400]), first, last))
    return found


@pytest.mark.parametrize("count", [0, 1, 2, 10, 60])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_overlaps(seed: int, count: int):
    given = blocks(seed, count)
    found = laid_out(given, deadline=time.monotonic() + 1, highs=False)
    checked_layout(given, found.offsets, found.size)
    steps = range(2 * count + 1)
    live = (sum(one.bytes for one in given if one.first <= at <= one.last) for at in steps)
    assert most_at_once(given) == found.lower_bound == max(live) <= found.size
    assert found.size <= 1.3 * found.lower_bound
    for one, place in zip(given, found.offsets, strict=True):
        for other, there in zip(given, found.offsets, strict=True):
            apart = place + one.bytes <= there or there + other.bytes <= place
            assert one is other or apart or not one.meets(other) or not one.bytes * other.bytes


@pytest.mark.parametrize(
    ("offsets", "size"), [((0, 32), 128), ((0, 64), 100), ((-64, 0), 128), ((0,), 128)]
)
def test_a_wrong_layout_is_told(offsets: tuple[int, ...], size: int):
    with pytest.raises(ParallelError, match="layout"):
        checked_layout([Block(64, 0, 1), Block(64, 1, 2)], offsets, size)


@needs_scipy
@pytest.mark.parametrize("seed", range(4))
def test_highs_lays_out_no_worse(seed: int):
    given = blocks(seed + 20, 12)
    rules = laid_out(given, deadline=time.monotonic(), highs=False)
    found = laid_out(given, deadline=time.monotonic() + 2, highs=True)
    assert found.lower_bound <= found.size <= rules.size


@needs_scipy
def test_highs_orders_as_branch_and_bound_does():
    # Each of two branches makes much on its way to little: one after the other is best.
    sizes = {0: 1, 1: 100, 2: 1, 3: 100, 4: 1, 5: 1}
    users = {0: (0, 1, 3), 1: (1, 2), 2: (2, 5), 3: (3, 4), 4: (4, 5), 5: (5,)}
    order = [0, 1, 3, 2, 4, 5]
    at = {one: place for place, one in enumerate(order)}
    storages = [
        Storage(str(one), size, at[one], tuple(sorted(at[user] for user in users[one])))
        for one, size in sizes.items()
    ]
    of = program([Operation(str(one)) for one in order], storages, [[]] * 6)
    found = ordered(of, deadline=time.monotonic() + 20, solve=by_highs)
    assert found.profile.peak == ordered(of, deadline=time.monotonic() + 20).profile.peak == 102


def test_the_caching_allocator_as_torch_has_it():
    allocator = CachingAllocator()
    first = allocator.allocate(100)
    assert allocator.reserved == 2 * 2**20
    second = allocator.allocate(2**20)
    third = allocator.allocate(2**20)  # no room is left beside the first
    assert allocator.reserved == 4 * 2**20
    for piece in (first, second, third, allocator.allocate(0)):
        allocator.free(piece)
    large = allocator.allocate(3 * 2**20)
    assert allocator.reserved == 24 * 2**20
    allocator.free(allocator.allocate(17 * 2**20))  # the rest of that segment
    assert allocator.reserved == 24 * 2**20
    allocator.allocate(18 * 2**20)
    assert allocator.reserved == 42 * 2**20
    allocator.free(large)
    allocator.allocate(20 * 2**20)
    assert allocator.reserved == 42 * 2**20
