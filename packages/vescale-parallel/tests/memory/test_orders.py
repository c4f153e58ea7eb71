"""A planned order is valid, never above program order, and optimal where it says so.

A layout has no overlaps and is never below what lives at once; small ones are solved.
"""

import importlib.util
import random
import time

import pytest
from vescale_parallel import ParallelError
from vescale_parallel._memory.caching import CachingAllocator
from vescale_parallel._memory.highs import by_highs
from vescale_parallel._memory.layout import Block, checked_layout, laid_out, most_at_once
from vescale_parallel._memory.order_choice import choose_order, ordered_by_ilp
from vescale_parallel._memory.program import Operation, Program, Storage, checked_order, program
from vescale_parallel._memory.reach import Reach
from vescale_parallel._memory.simulation import PrefixState, lifetimes, profile


def random_program(seed: int, size: int) -> Program:
    """Operations that wait for a few before them; some results are kept, some never used."""
    draw = random.Random(seed)
    before = []
    for at in range(size):
        near = range(max(0, at - 8), at)
        before.append(set(draw.sample(near, min(len(near), draw.choice([0, 1, 1, 2, 3])))))
    storages = []
    for at in range(size):
        later = [one for one in range(at + 1, size) if at in before[one]]
        for number in range(draw.choice([0, 1, 1, 1, 2])):
            users = (at, *(one for one in later if draw.random() < 0.8))
            size_of = draw.choice([0, 1, 5, 10, 100])
            storages.append(Storage(f"{at}.{number}", size_of, at, users, draw.random() < 0.1))
    operations = [Operation(str(at), draw.choice([0, 0, 0, 7])) for at in range(size)]
    return program(operations, storages, before)


def best_of_all(of: Program) -> int:
    """The lowest peak, by trying every order."""

    def below(running: list[int], done: frozenset[int]) -> int:
        if len(running) == len(of):
            return profile(of, running).peak
        ready = [at for at in range(len(of)) if at not in done and of.before[at] <= done]
        return min(below([*running, at], done | {at}) for at in ready)

    return below([], frozenset())


def naive_peak(of: Program, order: tuple[int, ...]) -> int:
    """The peak by its definition, step by step."""
    levels = [0]
    for step, operation in enumerate(order):
        gone, now = set(order[:step]), set(order[: step + 1])
        alive = [
            one.bytes
            for one in of.storages
            if one.maker in now and (one.kept or one.maker == operation or not {*one.users} <= gone)
        ]
        levels.append(sum(alive) + of.operations[operation].temporary)
    return max(levels)


@pytest.mark.parametrize("seed", range(30))
def test_small_programs_are_solved(seed: int):
    of = random_program(seed, 6)
    found = choose_order(of, deadline=time.monotonic() + 60)
    assert found.profile.peak == best_of_all(of) == found.lower_bound
    assert Reach(of).lower_bound() <= found.lower_bound


@pytest.mark.parametrize("seed", range(20))
def test_one_integer_program_finds_the_best_order(seed: int):
    pytest.importorskip("scipy.optimize", reason="scipy is not installed")
    of = random_program(seed, 7)
    found = ordered_by_ilp(of, deadline=time.monotonic() + 60)
    assert found.complete
    assert found.profile.peak == best_of_all(of)


def test_an_integer_program_that_cannot_end_leaves_program_order():
    pytest.importorskip("scipy.optimize", reason="scipy is not installed")
    of = random_program(1, 60)
    found = ordered_by_ilp(of, deadline=time.monotonic())
    assert found.order == tuple(range(60))
    assert not found.complete


@pytest.mark.parametrize("seed", range(8))
def test_orders_are_valid_and_never_above_program_order(seed: int):
    of = random_program(seed, 60)
    found = choose_order(of, deadline=time.monotonic() + 0.3)
    assert checked_order(of, found.order) == found.order
    start = profile(of, range(len(of))).peak
    assert found.peaks["program order"] == start >= found.profile.peak >= found.lower_bound
    assert found.profile.peak == naive_peak(of, found.order)


@pytest.mark.parametrize("seconds", [-1.0, 0.0])
def test_without_time_there_is_still_a_plan_and_it_says_so(seconds: float):
    of = random_program(3, 80)
    found = choose_order(of, deadline=time.monotonic() + seconds)
    assert checked_order(of, found.order)
    assert not found.complete
    assert found.profile.peak <= found.peaks["program order"]


@pytest.mark.parametrize("seed", range(5))
def test_a_prefix_knows_what_the_simulator_knows(seed: int):
    of = random_program(seed, 40)
    running = PrefixState(of)
    levels = []
    for at in range(len(of)):
        running.run(at)
        levels.append(running.live)
    found = profile(of, running.order)
    assert tuple(levels) == found.after
    assert running.peak == found.peak


def test_kept_storages_live_to_the_end():
    storages = [Storage("a", 4, 0, (0,), kept=True), Storage("b", 8, 0, (0,))]
    of = program([Operation("0"), Operation("1")], storages, [[], [0]])
    assert lifetimes(of, (0, 1)) == [(0, 1), (0, 0)]
    assert profile(of, (0, 1)).after == (4, 4)


@pytest.mark.parametrize("order", [(1, 0), (0,), (0, 0), (0, 2)])
def test_a_wrong_order_is_told(order: tuple[int, ...]):
    of = program([Operation("a"), Operation("b")], [], [[], [0]])
    with pytest.raises(ParallelError, match="order"):
        checked_order(of, order)


def test_updates_are_pulled_forward():
    """Gradients that all wait for the end, as updates after a backward do: one lives at a time."""
    count = 20
    operations = [Operation(f"gradient {at}") for at in range(count)]
    operations += [Operation(f"update {at}") for at in range(count)]
    storages = [Storage(str(at), 100, at, (at, count + at)) for at in range(count)]
    chain = [[at - 1] if at else [] for at in range(count)]
    of = program(operations, storages, [*chain, *([at] for at in range(count))])
    found = choose_order(of, deadline=time.monotonic() + 60)
    assert (found.peaks["program order"], found.profile.peak) == (100 * count, 100)


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
    found = choose_order(of, deadline=time.monotonic() + 20, solve=by_highs)
    assert (
        found.profile.peak == choose_order(of, deadline=time.monotonic() + 20).profile.peak == 102
    )


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
