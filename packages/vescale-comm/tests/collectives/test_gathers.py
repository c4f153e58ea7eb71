"""Gathers, exchanges and broadcasts return the bits that one process would have put there.

Over random shapes, dims, strides, dtypes and sizes, even, uneven and empty, on 1 to 3 ranks.
"""

import random

import pytest
import torch
import vescale_comm as vc
import vescale_comm_dense as dense
from vescale_comm_dense import DTYPES
from vescale_comm_worlds import bits, run, same_bits


def tensor(rng, shape, dtype):
    """Any bits of the dtype, in a tensor that is contiguous, transposed or strided."""
    kind = rng.choice(["plain", "transposed", "strided"])
    order = tuple(reversed(shape)) if kind == "transposed" else tuple(shape)
    if kind == "strided" and order:
        order = (*order[:-1], 2 * order[-1])
    numel = torch.Size(order).numel()
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    raw = raw & 1 if dtype is torch.bool else raw
    whole = raw.view(dtype).view(order)
    if kind == "transposed":
        return whole.permute(tuple(reversed(range(len(shape)))))
    return whole[..., ::2] if kind == "strided" and order else whole


def same(found, expected):
    return found.is_contiguous() and same_bits(found, expected)


def check_gathers(rank, world_size, seed):
    rng = random.Random(seed)
    for case in range(60):
        dtype = DTYPES[case % len(DTYPES)]
        shape = [rng.randint(0, 3) for _ in range(rng.randint(1, 4))]
        dim = rng.randrange(-len(shape), len(shape))
        even = rng.random() < 0.3
        sizes = [rng.choice([0, 1, 2, 5])] * world_size
        if not even:
            sizes = [rng.choice([0, 0, 1, 2, 5]) for _ in range(world_size)]
        pieces = []
        for size in sizes:
            shape[dim] = size
            pieces.append(tensor(rng, shape, dtype))
        before = bits(pieces[rank]).clone()
        found = vc.all_gather(pieces[rank], dim=dim, sizes=None if even else sizes)
        assert same(found, dense.all_gather(pieces, dim=dim)[rank]), (sizes, shape, dim, dtype)
        assert torch.equal(bits(pieces[rank]), before)


def check_pieces(rank, world_size, seed):
    rng = random.Random(seed)
    for case in range(40):
        dtype = DTYPES[case % len(DTYPES)]
        shapes = [random_shape(rng) for _ in range(world_size)]
        pieces = [tensor(rng, shape, dtype) for shape in shapes]
        found = vc.gather_pieces(pieces[rank], shapes=shapes)
        assert all(map(same, found, pieces)), (shapes, dtype)


def check_exchanges(rank, world_size, seed):
    rng = random.Random(seed)
    ranks = range(world_size)
    for case in range(40):
        dtype = DTYPES[case % len(DTYPES)]
        shapes = [[random_shape(rng) for _ in ranks] for _ in ranks]
        pieces = [[tensor(rng, shape, dtype) for shape in row] for row in shapes]
        found = vc.all_to_all(pieces[rank], shapes=[shapes[peer][rank] for peer in ranks])
        assert len(found) == world_size
        assert all(map(same, found, dense.all_to_all(pieces)[rank])), (shapes, dtype)


def check_flat_exchanges(rank, world_size, seed):
    rng = random.Random(seed)
    for case in range(40):
        dtype = DTYPES[case % len(DTYPES)]
        counts = [
            [rng.choice([0, 0, 1, 2, 5]) for _ in range(world_size)] for _ in range(world_size)
        ]
        buffers = [tensor(rng, [sum(row)], dtype) for row in counts]
        sizes = vc.SplitSizes(counts[rank], [row[rank] for row in counts])
        found = vc.all_to_all_single(buffers[rank], sizes=sizes)
        # As bytes, which torch joins for every dtype.
        sent = [bits(x).view(-1).split([n * dtype.itemsize for n in row])
                for x, row in zip(buffers, counts, strict=True)]  # fmt: skip
        assert torch.equal(bits(found).view(-1), torch.cat([row[rank] for row in sent])), counts


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(vc.CommArgumentError, match="1 sizes and receive 2"):
        vc.SplitSizes([1], [1, 2])
    with pytest.raises(vc.CommArgumentError, match="none negative"):
        vc.SplitSizes([-1], [1])
    with pytest.raises(vc.CommArgumentError, match="whole numbers"):
        vc.SplitSizes([1.5], [1])
    run(wrong_flat_exchange, 2)


def wrong_flat_exchange(rank, world_size):
    wrong = {
        "for another group": (torch.ones(1), vc.SplitSizes([1], [1])),
        "another length": (torch.ones(3), vc.SplitSizes([1, 1], [1, 1])),
        "not flat": (torch.ones(2, 1), vc.SplitSizes([1, 1], [1, 1])),
        "keeps something else": (torch.ones(2), vc.SplitSizes([1, 1], [2, 2])),
    }
    for x, sizes in wrong.values():
        with pytest.raises(vc.CommArgumentError, match="does not fit"):
            vc.all_to_all_single(x, sizes=sizes)


def check_broadcasts(rank, world_size, seed):
    rng = random.Random(seed)
    for case in range(40):
        dtype = DTYPES[case % len(DTYPES)]
        shape, source = random_shape(rng), rng.randrange(world_size)
        xs = [tensor(rng, shape, dtype) for _ in range(world_size)]
        before = bits(xs[rank]).clone()
        found = vc.broadcast(xs[rank], source=source)
        assert same(found, dense.broadcast(xs, source=source)[rank]), (shape, dtype)
        assert torch.equal(bits(xs[rank]), before)


def random_shape(rng):
    return tuple(rng.choice([0, 1, 2, 3]) for _ in range(rng.randint(0, 3)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "check",
    [check_gathers, check_pieces, check_exchanges, check_flat_exchanges, check_broadcasts],
    ids=lambda f: f.__name__,
)
def test_moves_equal_one_process(check, world_size):
    run(check, world_size, 1000 + world_size)


def lazily(rank, world_size):
    """Conjugated and negated views: their memory is not their values."""
    z = torch.tensor([1 + 2j, 3 - 1j])
    vc.all_gather(z.real.clone())  # so that the short road is known
    wrong = []
    for x in (z.conj(), z.conj().imag):
        plain = x.resolve_conj().resolve_neg()
        whole = {
            "all_reduce": (vc.all_reduce(x), plain * 2),
            "ordered": (vc.all_reduce(x, order="tree"), plain * 2),
            "bucketed": (vc.all_reduce_bucketed([x])[0], plain * 2),
            "later": (vc.all_reduce(x, async_op=True).wait(), plain * 2),
            "reduce_scatter": (vc.reduce_scatter(x), plain[rank : rank + 1] * 2),
            "all_gather": (vc.all_gather(x), torch.cat([plain, plain])),
            "again": (vc.all_gather(x), torch.cat([plain, plain])),
            "into": (vc.all_gather_into_tensor(plain.new_empty(4), x), torch.cat([plain, plain])),
            "broadcast": (vc.broadcast(x), plain),
            "permute": (vc.permute(x, pairs=[(0, 1), (1, 0)]), plain),
            "scatter": (vc.scatter(x), plain[rank : rank + 1]),
            "gather_pieces": (vc.gather_pieces(x, shapes=[(2,)] * 2)[1], plain),
            "all_to_all": (vc.all_to_all([x, x], shapes=[(2,)] * 2)[0], plain),
        }
        wrong += [name for name, (found, right) in whole.items() if not torch.equal(found, right)]
    return wrong


def test_what_torch_conjugates_and_negates_lazily_travels_as_its_values():
    assert run(lazily, 2) == [[], []]


def into_again(rank, world_size):
    x = torch.arange(6.0).reshape(3, 2) + 6 * rank
    for _ in range(2):  # once with all checks, then by the short road
        first, second, part = (torch.zeros(6, 2) for _ in range(3))
        handle = vc.all_gather_into_tensor(first, x, async_op=True)
        assert vc.all_gather_into_tensor(second, x) is second
        assert handle.wait() is first
        # Of memory that is sent and written to.
        part[3 * rank : 3 * rank + 3] = x
        vc.all_gather_into_tensor(part, part[3 * rank : 3 * rank + 3])
        with pytest.raises(vc.CommArgumentError, match="the result"):
            vc.all_gather_into_tensor(torch.zeros(5, 2), x)
    return [one.tolist() for one in (first, second, part)]


def test_memory_of_the_caller_is_filled_by_either_road():
    whole = torch.arange(12.0).reshape(6, 2).tolist()
    assert run(into_again, 2) == [[whole] * 3] * 2


def returned_is_new(rank, world_size):
    x = torch.ones(2, 2)
    results = [
        vc.all_gather(x),
        vc.broadcast(x),
        *vc.gather_pieces(x, shapes=[(2, 2)] * world_size),
    ]
    results += vc.all_to_all([x] * world_size, shapes=[(2, 2)] * world_size)
    for result in results:
        result.fill_(7)
    return x


@pytest.mark.parametrize("world_size", [1, 2])
def test_results_do_not_share_memory_with_the_input(world_size):
    assert all(x.eq(1).all() for x in run(returned_is_new, world_size))
