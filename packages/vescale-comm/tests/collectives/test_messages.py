"""Messages, scatters, in-place forms and handles: the bits and the gradients of one process."""

import gc
import random
import re

import pytest
import torch
import vescale_comm as vc
from vescale_comm.testing import on_ranks
from vescale_comm_worlds import outcomes, run, same_bits

DTYPES = [torch.float32, torch.float8_e5m2, torch.int16, torch.bool, torch.complex64]


def tensors(seed, count, shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).abs().to(dtype) for _ in range(count)]


def moves(rank, world_size):
    rng, emulator = random.Random(world_size), vc.Emulator(world_size)
    for dtype in DTYPES:
        for _ in range(4):
            shape = [(), (3,), (2, 0), (4, 3)][rng.randrange(4)]
            xs = tensors(rng.getrandbits(20), world_size, shape, dtype)
            froms, tos = list(range(world_size)), list(range(world_size))
            rng.shuffle(froms)
            rng.shuffle(tos)
            count = rng.randint(0, world_size)
            pairs = list(zip(froms[:count], tos[:count], strict=True))
            found = vc.permute(xs[rank], pairs=pairs)
            came = dict(zip(tos[:count], froms[:count], strict=True)).get(rank)
            expected = torch.zeros_like(xs[rank]) if came is None else xs[came]
            assert same_bits(found, expected)
            assert same_bits(found, emulator.permute(xs, pairs=pairs)[rank])

            sizes = [rng.choice([0, 1, 3]) for _ in range(world_size)]
            xs = tensors(rng.getrandbits(20), world_size, (2, sum(sizes)), dtype)
            source = rng.randrange(world_size)
            how = {"source": source, "dim": 1, "sizes": sizes}
            found = vc.scatter(xs[rank].T.contiguous().T, **how)
            expected = xs[source].split(sizes, 1)[rank]
            assert same_bits(found, expected)
            assert same_bits(found, emulator.scatter(xs, **how)[rank])
            if rank == 0 and world_size > 1:
                vc.send(xs[0], target=world_size - 1)
            if rank == world_size - 1 and world_size > 1:
                assert same_bits(vc.recv(torch.empty_like(xs[0]), source=0), xs[0])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_messages_bring_the_bits(world_size):
    run(moves, world_size)


def uneven_permute(rank, world_size):
    pairs = [(0, 1), (1, 2), (2, 0)]
    return vc.permute(torch.full((rank,), float(rank)), pairs=pairs, shape=((rank - 1) % 3,))


def test_a_permutation_of_different_shapes():
    assert [x.tolist() for x in run(uneven_permute, 3)] == [[2.0, 2.0], [], [1.0]]


GRADIENTS = {
    "permute": (vc.permute, {"pairs": [(0, 2), (1, 0)]}),
    "scatter": (vc.scatter, {"source": 1, "sizes": [1, 0, 3]}),
}


@pytest.mark.parametrize("name", ["permute", "scatter"])
@on_ranks(3)
def test_gradients_go_back_the_same_ways(rank, world_size, name):
    call, how = GRADIENTS[name]
    xs = [x.requires_grad_() for x in tensors(3, world_size, (4, 2))]
    outputs = getattr(vc.Emulator(3), name)(xs, **how)
    total = sum((y * y * y).sum() * m for m, y in enumerate(outputs, 1))
    first = torch.autograd.grad(total, xs, create_graph=True)
    second = torch.autograd.grad(sum((g * g).sum() for g in first), xs)
    x = xs[rank].detach().requires_grad_()
    y = call(x, **how)
    (found,) = torch.autograd.grad((y * y * y).sum() * (rank + 1), x, create_graph=True)
    (again,) = torch.autograd.grad((found * found).sum(), x)
    assert torch.equal(found, first[rank])
    torch.testing.assert_close(again, second[rank])


def in_place(rank, world_size):
    for op, order, wire in [
        ("sum", "native", None),
        ("avg", "native", None),
        ("avg", "tree", None),
        ("sum", "rank", "int8"),
    ]:
        x = tensors(rank, 1, (6, 2), torch.float32)[0]
        expected = vc.all_reduce(x, op=op, order=order, wire=wire)
        work = x.clone()
        assert vc.all_reduce_(work, op=op, order=order, wire=wire) is work
        assert torch.equal(work, expected)
        later = x.clone()
        assert vc.all_reduce_(later, op=op, order=order, wire=wire, async_op=True).wait() is later
        assert torch.equal(later, expected)
        sizes = [6 - world_size + 1] + [1] * (world_size - 1)
        piece = vc.reduce_scatter(x, sizes=sizes, op=op, order=order, wire=wire)
        out = torch.empty_like(piece)
        how = {"sizes": sizes, "op": op, "order": order, "wire": wire}
        assert vc.reduce_scatter_tensor(out, x, **how) is out
        assert torch.equal(out, piece)
    x = torch.full((rank + 1, 2), float(rank), dtype=torch.bfloat16)
    sizes = list(range(1, world_size + 1))
    out = torch.empty(sum(sizes), 2, dtype=torch.bfloat16)
    assert vc.all_gather_into_tensor(out, x, sizes=sizes) is out
    assert torch.equal(out, vc.all_gather(x, sizes=sizes))
    even = torch.empty(world_size, 2)
    assert torch.equal(vc.all_gather_into_tensor(even, x[:1].float()), vc.all_gather(x[:1].float()))
    assert torch.equal(vc.broadcast_(even + rank, source=world_size - 1), even + world_size - 1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_in_place_forms_write_what_the_others_return(world_size):
    run(in_place, world_size)


STARTS = {
    "all_reduce": lambda x, **k: vc.all_reduce(x, **k),
    "avg": lambda x, **k: vc.all_reduce(x, op="avg", **k),
    "ordered": lambda x, **k: vc.all_reduce(x, order="tree", **k),
    "compressed": lambda x, **k: vc.all_reduce(x, wire="bf16", **k),
    "all_gather": lambda x, **k: vc.all_gather(x, dim=1, **k),
    "uneven": lambda x, **k: vc.all_gather(x, sizes=[4] * 3, **k),
    "reduce_scatter": lambda x, **k: vc.reduce_scatter(x, sizes=[1, 0, 3], **k),
    "even": lambda x, **k: vc.reduce_scatter(torch.cat([x, x[:2]]), **k),
    "even avg": lambda x, **k: vc.reduce_scatter(torch.cat([x, x[:2]]), op="avg", **k),
    "all_to_all": lambda x, **k: vc.all_to_all([x, x[:1], 2 * x], shapes=shapes_to(k), **k),
    "gather_pieces": lambda x, **k: vc.gather_pieces(x, shapes=[(4, 2)] * 3, **k),
    "broadcast": lambda x, **k: vc.broadcast(x, source=1, **k),
    "scatter": lambda x, **k: vc.scatter(x, sizes=[1, 1, 2], **k),
    "permute": lambda x, **k: vc.permute(x, pairs=[(0, 1), (1, 0)], **k),
}


def shapes_to(options):
    return [[(4, 2)] * 3, [(1, 2)] * 3, [(4, 2)] * 3][torch.distributed.get_rank()]


@on_ranks(3)
def test_a_handle_gives_what_the_call_returns_and_its_gradient(rank, world_size):
    for name, start in STARTS.items():
        x, y = (tensors(rank, 1, (4, 2))[0].requires_grad_() for _ in range(2))
        first = start(x, async_op=True)
        second = start(x.detach(), async_op=True)  # several under way
        assert "under way" in repr(first)
        results = [first.wait(), second.wait(), start(y)]
        results = [r if isinstance(r, list) else [r] for r in results]
        for one, two, three in zip(*results, strict=True):
            assert torch.equal(one, three), name
            assert torch.equal(two, three), name
        sum(r.square().sum() for r in results[0]).backward()
        sum(r.square().sum() for r in results[2]).backward()
        assert torch.equal(x.grad, y.grad), name
        assert results[1][0].grad_fn is None
    assert vc.unwaited() == []


def message_handles(rank, world_size):
    x = torch.arange(3.0)
    if rank == 0:
        vc.send(x, target=1, async_op=True).wait()
    else:
        return vc.recv(x * 0, source=0, async_op=True).wait()


def test_messages_have_handles():
    assert run(message_handles, 2)[1].tolist() == [0.0, 1.0, 2.0]


def test_a_handle_is_waited_for_once_and_an_unwaited_one_is_named():
    def drop():
        vc.all_reduce(torch.ones(2), async_op=True)
        gc.collect()

    def program(rank, world_size):
        handle = vc.all_reduce(torch.ones(2), async_op=True)
        listed = vc.unwaited()
        handle.wait()
        with pytest.raises(Exception, match="waited for twice") as caught:
            handle.wait()
        with pytest.warns(vc.UnwaitedWarning, match="was never waited for") as warned:
            drop()
        return listed, str(caught.value), str(warned[0].message)

    for listed, twice, never in vc.simulate(2)(program):
        where = r"all_reduce from .*test_messages.py:\d+ in program"
        assert any(re.search(where, line) for line in listed)
        assert twice.count("test_messages.py:") == 3
        assert "test_messages.py:" in never


def waited_twice(rank, world_size):
    handle = vc.all_reduce(torch.ones(2), async_op=True)
    handle.wait()
    handle.wait()


def test_a_handle_waited_for_twice_is_an_error_on_every_rank():
    for outcome in outcomes(waited_twice, 2):
        assert outcome.type_name == "CommError"
        assert outcome.message.count("in waited_twice") == 3


def bytes_of(rank, world_size):
    with vc.trace() as t:
        vc.permute(torch.ones(4), pairs=[(0, 1), (2, 2)])
        vc.scatter(torch.ones(6), source=2, sizes=[1, 2, 3])
    return [record.bytes for record in t.records]


def test_bytes_are_what_leaves_a_member():
    assert run(bytes_of, 3) == [[16, 0], [0, 0], [0, 12]]


@on_ranks(2)
def test_messages_like_those_before(rank, world_size):
    """After the first ones, messages of a kind go straight to the backend."""
    peer, found = 1 - rank, []
    kinds = [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).T,  # its values travel, row-major
        torch.arange(4, dtype=torch.bfloat16),
        torch.full((3,), 1 + 2j, dtype=torch.complex64).conj(),
        torch.zeros(0, 4),
        torch.tensor(2.5),
        torch.arange(5.0)[::2],
    ]
    for _ in range(3):
        for x in kinds:
            like = torch.empty((), dtype=x.dtype).expand(x.shape)
            coming = vc.recv(like, source=peer, async_op=True)
            sent = vc.send(x + 0 if rank else x, target=peer, async_op=True)
            found.append((coming.wait(), x))
            sent.wait()
    for came, x in found:
        assert came.shape == x.shape
        assert came.is_contiguous()
        assert torch.equal(came, x)
    # What was refused is refused, and is told of, as before.
    with pytest.raises(vc.CommArgumentError, match="not a member"):
        vc.send(kinds[0], target=2, async_op=True)
    with pytest.raises(vc.CommArgumentError, match="this member itself"):
        vc.recv(kinds[0], source=rank, async_op=True)
    with pytest.raises(vc.CommArgumentError, match="no gradient"):
        vc.send(kinds[0].clone().requires_grad_(), target=peer, async_op=True)
    with pytest.raises(vc.CommArgumentError, match="takes a tensor"):
        vc.send([1.0], target=peer, async_op=True)
    with vc.trace() as traced:
        coming = vc.recv(kinds[0], source=peer, async_op=True)
        vc.send(kinds[0], target=peer, async_op=True).wait()
        coming.wait()
    assert [one.op for one in traced.records] == ["recv", "send"]
    assert vc.unwaited() == []


def own_reduce_scatter_gradient(x):
    x = x.detach().requires_grad_()
    y = vc.reduce_scatter(x, sizes=[3, 2])
    y.backward(torch.full_like(y, 1.0 + y.numel()))
    return x.grad


COLLECTIVES = {
    "all_gather, uneven": lambda x, rank: vc.all_gather(x[rank:], sizes=[5, 4]),
    "all_gather": lambda x, rank: vc.all_gather(x),
    "scatter": lambda x, rank: vc.scatter(x, sizes=[1, 4]),
    "permute": lambda x, rank: vc.permute(x, pairs=[(0, 1)]),
    "permute, both ways": lambda x, rank: vc.permute(x, pairs=[(0, 1), (1, 0)]),
    "gather_pieces": lambda x, rank: torch.cat(
        vc.gather_pieces(x[: 5 - rank], shapes=[(5,), (4,)])
    ),
    "reduce_scatter, backward": lambda x, rank: own_reduce_scatter_gradient(x),
    "all_to_all": lambda x, rank: vc.all_to_all([x, x + 1], shapes=[(5,)] * 2)[1 - rank],
    "broadcast": lambda x, rank: vc.broadcast(x, source=0),
    "all_reduce": lambda x, rank: vc.all_reduce(x),
}


def begun(rank):
    message = torch.full((5,), 7.0)
    if rank == 0:
        return vc.send(message, target=1, async_op=True)
    return vc.recv(message, source=0, async_op=True)


@on_ranks(2)
def test_collectives_and_messages_of_one_group_are_kept_apart(rank, world_size):
    x = torch.arange(5.0) + 10 * rank
    for name, collective in COLLECTIVES.items():
        expected = collective(x, rank)
        for first in ((True, True), (True, False), (False, True)):
            handle = begun(rank) if first[rank] else None
            found = collective(x, rank)
            got = (handle or begun(rank)).wait()
            assert torch.equal(found, expected), name
            assert rank == 0 or got.eq(7).all(), name
