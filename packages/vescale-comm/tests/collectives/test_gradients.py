"""First and second derivatives of every collective equal those of the dense emulation.

The loss is the sum of the members' losses, each a nonlinear function of that member's output; torch
differentiates the emulation on one process. Counted, too: one collective for one backward.
"""

from functools import partial

import pytest
import torch
import vescale_comm as vc
import vescale_comm_dense as dense
from vescale_comm.testing import on_ranks
from vescale_comm_worlds import refusals, run


def inputs(shapes):
    """The same on every rank: all members' inputs, as leaves."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def loss_of(outputs, member):
    """Differs between members, and its second derivative between elements."""
    return sum(((member + 1) * x * (index + 1)).sin().sum() for index, x in enumerate(outputs))


def compare(rank, world_size, shapes, ours, emulated):
    """Compares derivatives by this rank's input; all members' losses count."""
    xs = inputs(shapes)
    outputs = emulated(xs)
    total = sum(loss_of(listed(outputs[member]), member) for member in range(world_size))
    first = torch.autograd.grad(total, xs, create_graph=True)
    # Each rank forms the same sum over its own gradient only; together they are the dense one.
    along = sum((g * x.detach().cos()).sum() for g, x in zip(first, xs, strict=True))
    second = torch.autograd.grad(along, xs)

    x = xs[rank].detach().requires_grad_()
    found = ours(x)
    found_first = torch.autograd.grad(loss_of(listed(found), rank), x, create_graph=True)[0]
    found_second = torch.autograd.grad((found_first * x.detach().cos()).sum(), x)[0]
    for result, expected in zip(listed(found), listed(outputs[rank]), strict=True):
        torch.testing.assert_close(result, expected)
    torch.testing.assert_close(found_first, first[rank])
    torch.testing.assert_close(found_second, second[rank])


def listed(x):
    return list(x) if isinstance(x, list | tuple) else [x]


# Of each case: the shapes of the members' inputs, this rank's call, and the same on one process.


def reduce_sum(rank, world_size, op):
    shapes = [(2, 3)] * world_size
    return shapes, lambda x: vc.all_reduce(x, op=op), lambda xs: dense.all_reduce(xs, op=op)


def gather(rank, world_size, dim, sizes):
    sizes, how = sizes[:world_size], {"dim": dim}
    shapes = [tuple(size if each == dim else 2 for each in range(3)) for size in sizes]
    return shapes, partial(vc.all_gather, sizes=sizes, **how), partial(dense.all_gather, **how)


def scatter(rank, world_size, dim, sizes, op):
    how = {"dim": dim, "sizes": sizes[:world_size], "op": op}
    shape = tuple(sum(how["sizes"]) if each == dim else 2 for each in range(3))
    return (
        [shape] * world_size,
        partial(vc.reduce_scatter, **how),
        partial(dense.reduce_scatter, **how),
    )


def pieces(rank, world_size):
    shapes = [(), (2, 2), (0, 3), (1,)][:world_size]
    return shapes, partial(vc.gather_pieces, shapes=shapes), lambda xs: [xs] * world_size


def cuts_of(world_size):
    # Member i's input is a vector, of which j gets i * (j + 1) elements: member 0 sends nothing,
    # and still has to take its part in every collective of both backwards.
    return [[i * (j + 1) for j in range(world_size)] for i in range(world_size)]


def exchanged(xs, cuts):
    return dense.all_to_all([x.split(cut) for x, cut in zip(xs, cuts, strict=True)])


def exchange(rank, world_size):
    cuts = cuts_of(world_size)
    come = [(cut[rank],) for cut in cuts]
    return (
        [(sum(cut),) for cut in cuts],
        lambda x: vc.all_to_all(x.split(cuts[rank]), shapes=come),
        lambda xs: exchanged(xs, cuts),
    )


def flat_exchange(rank, world_size):
    cuts = cuts_of(world_size)
    sizes = vc.SplitSizes(cuts[rank], [cut[rank] for cut in cuts])

    def emulated(xs):
        # As columns: of an empty vector torch.cat returns a gradient without a history.
        rows = exchanged(xs, cuts)
        return [torch.cat([part.reshape(-1, 1) for part in row]).view(-1) for row in rows]

    return [(sum(cut),) for cut in cuts], partial(vc.all_to_all_single, sizes=sizes), emulated


def broadcast_from(rank, world_size):
    source = world_size - 1
    # With the inputs that do not count, so that torch knows of their zero gradients.
    emulated = lambda xs: [xs[source] + 0 * x for x in xs]  # noqa: E731
    return [(3,)] * world_size, partial(vc.broadcast, source=source), emulated


def bucketed(rank, world_size):
    return (
        [(5,)] * world_size,
        lambda x: vc.all_reduce_bucketed([x[:2], x[2:].view(3, 1)], cap_bytes=16),
        lambda xs: [[y[:2], y[2:].view(3, 1)] for y in dense.all_reduce(xs)],
    )


CASES = [
    (reduce_sum, "sum"),
    (reduce_sum, "avg"),
    *[(gather, dim, sizes) for dim in range(3) for sizes in ([2, 2, 2, 2], [3, 0, 1, 2])],
    *[
        (scatter, dim, sizes, op)
        for dim in range(3)
        for sizes in ([2, 2, 2, 2], [0, 3, 1, 2])
        for op in ("sum", "avg")
    ],
    *[(case,) for case in (pieces, exchange, flat_exchange, broadcast_from, bucketed)],
]


def every_case(rank, world_size):
    for case, *how in CASES:
        if (case, world_size) != (broadcast_from, 1):
            compare(rank, world_size, *case(rank, world_size, *how))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_derivatives_equal_those_of_one_process(world_size):
    run(every_case, world_size)


def count_backward(rank, world_size):
    x = torch.ones(2, 4, requires_grad=True)
    results = {}
    for name, call in {
        "all_reduce": lambda: vc.all_reduce(x),
        "all_gather": lambda: vc.all_gather(x, dim=1),
        "reduce_scatter": lambda: vc.reduce_scatter(x),
        "all_to_all": lambda: vc.all_to_all([x, 2 * x], shapes=[(2, 4)] * 2)[0],
        "gather_pieces": lambda: vc.gather_pieces(x, shapes=[(2, 4)] * 2)[1],
        "broadcast": lambda: vc.broadcast(x),
    }.items():
        loss = call().sum()
        with vc.trace() as t:
            loss.backward()
        results[name] = t.counts()
    return results


def test_backward_is_one_collective():
    expected = {
        "all_reduce": {"all_reduce": 1},
        "all_gather": {"reduce_scatter": 1},
        "reduce_scatter": {"all_gather": 1},
        "all_to_all": {"all_to_all": 1},
        "gather_pieces": {"reduce_scatter": 1},
        "broadcast": {"reduce": 1},
    }
    assert run(count_backward, 2) == [expected] * 2


def graph_nodes(rank, world_size):
    leaf = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        without_grad_mode = vc.all_reduce(leaf).grad_fn
    return [
        vc.all_reduce(torch.ones(2)).grad_fn is None,
        without_grad_mode is None,
        vc.all_reduce(leaf).grad_fn is not None,
        vc.all_reduce(leaf).is_leaf,
    ]


def test_a_graph_is_recorded_only_where_a_gradient_is_wanted():
    assert run(graph_nodes, 2) == [[True, True, True, False]] * 2


WRITTEN = {
    "all_reduce": lambda x: vc.all_reduce(x),
    "avg": lambda x: vc.all_reduce(x, op="avg", order="tree"),
    "all_gather": lambda x: vc.all_gather(x),
    "inside": lambda x: vc.all_gather(x, dim=1),
    "reduce_scatter": lambda x: vc.reduce_scatter(x),
    "broadcast": lambda x: vc.broadcast(x),
    "all_to_all": lambda x: vc.all_to_all([x, 2 * x], shapes=[(4, 2)] * 2)[1],
    "gather_pieces": lambda x: vc.gather_pieces(x, shapes=[(4, 2)] * 2)[1],
    "bucketed": lambda x: vc.all_reduce_bucketed([x, 2 * x])[1],
    "later": lambda x: vc.all_reduce(x, async_op=True).wait(),
}


@on_ranks(2)
def test_a_result_may_be_written_into_before_the_backward(rank, world_size):
    for name, call in WRITTEN.items():
        gradients = []
        for write in (lambda y: y.mul_(3), lambda y: y * 3):
            x = torch.full((4, 2), rank + 1.0, requires_grad=True)
            write(call(x)).square().sum().backward()
            gradients.append(x.grad)
        assert torch.equal(*gradients), name


def reduce_with_gradient(rank, world_size):
    x, calls = torch.ones(2, requires_grad=True), {}
    for call in (vc.all_reduce, vc.reduce_scatter):
        for op in ("max", "min", "prod"):
            call(x.detach(), op=op)
            with torch.no_grad():
                call(x, op=op)
            calls[f"{call.__name__} with op='{op}'"] = partial(call, x, op=op)
    return refusals(calls)


def test_reductions_without_a_gradient_say_so():
    for found in run(reduce_with_gradient, 2):
        assert len(found) == 6
        for name, (kind, words) in found.items():
            assert kind == "CommArgumentError"
            assert f"{name} has no gradient" in words
