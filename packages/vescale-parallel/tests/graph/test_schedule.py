"""Scheduled graphs have the bits of the graph, and one order of collectives on all ranks.

On random programs: collectives of every kind over two axes and over both, in-place writes, views,
random draws, ranks that compute more than others, or for which a result does not depend on a
collective that it depends on elsewhere.
"""

import random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_comm import all_gather, all_reduce, all_to_all, group_of, reduce_scatter, simulate
from vescale_comm.testing import device_mesh
from vescale_parallel import graph, memory
from vescale_parallel._graph.collectives import collectives

INPUTS, STEPS = 3, 24


def program(seed, rank, groups):
    """A random function; which collectives it makes does not depend on the rank."""
    shared, own = random.Random(seed), random.Random(f"{seed} {rank}")

    def function(*inputs):
        known, kept = list(inputs), []
        for _ in range(STEPS):
            x = shared.choice(known)
            kind = shared.choice("pmvwdRRRGST")
            group = groups[shared.choice([*groups])]
            if kind == "p":
                made = (x * 1.5).sin() + shared.choice(known)
            elif kind == "m":
                made = x @ shared.choice(known) / 4
            elif kind == "v":
                made = x.t()
            elif kind == "w":
                made = x.clone()
                made[0].add_(shared.choice(known)[1])
            elif kind == "d":
                made = x + torch.rand_like(x)
            elif kind == "R":
                made = all_reduce(x, group, op=shared.choice(["sum", "max", "avg"]))
            elif kind == "G":
                made = all_gather(x, group)[1:5]
            elif kind == "S":
                made = reduce_scatter(torch.cat([x, x + 1]), group).reshape(-1, 4)[:2].repeat(2, 1)
            else:
                halves = x.chunk(group.size)
                made = all_to_all(
                    list(halves), shapes=[tuple(h.shape) for h in halves], group=group
                )
                made = torch.cat(made)
            if own.random() < 0.2:
                made = made + torch.zeros_like(made) * own.random()
            if shared.random() < 0.2 and rank % 2:  # masked here: depends on nothing
                made = torch.zeros_like(made)
            if shared.random() < 0.15:
                kept.append(made)
            else:
                known.append(made)
        return [*kept, *known[INPUTS:]]

    return function


def check(module, inputs, expected, **options):
    made = graph.schedule(module, **options)
    torch.manual_seed(3)
    found = made.graph_module(*inputs)
    state = torch.get_rng_state()
    assert all(map(torch.equal, found, expected[0])), options
    assert torch.equal(state, expected[1])
    assert len(collectives(made.graph_module.graph)) == len(made.buckets)
    assert sorted(at for one in made.buckets for at in one) == list(range(len(made.agreed.entries)))
    str(made)
    return made


def on_a_rank(rank, world_size, seeds):
    mesh = device_mesh((2, 2), ("dp", "tp")) if world_size == 4 else device_mesh((2,), ("dp",))
    axes = ["dp", "tp"] if world_size == 4 else ["dp"]
    # Of two members: a sum of three or more may depend on the place in a bucket.
    groups = {name: group_of(mesh, name) for name in axes}
    said = []
    for seed in seeds:
        inputs = [torch.randn(4, 4) for _ in range(INPUTS)]
        before = [one.clone() for one in inputs]
        module = make_fx(program(seed, rank, groups), tracing_mode="fake")(*inputs)
        torch.manual_seed(3)
        expected = module(*inputs), torch.get_rng_state()
        for options in (
            {"buckets": None},
            {"overlap": False},
            {},
            {"cap_bytes": 200, "ahead_bytes": 1},
            {"exact": True, "link": graph.Link(latency=1e-6, bandwidth=1e9)},
        ):
            made = check(module, inputs, expected, **options)
            # Ranks in one group start the same; the kinds and their order are everybody's.
            said.append(made.buckets)
        if seed % 4 == 0:
            plan = memory.plan(made.graph_module, solver="rules", seconds=0)
            torch.manual_seed(3)
            assert all(map(torch.equal, plan.run(*inputs), expected[0]))
        assert all(map(torch.equal, inputs, before))
    return said


@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(2)), (4, range(4, 5))])
def test_random_graphs(ranks, seeds):
    first, *others = simulate(ranks).run(on_a_rank, seeds)
    assert all(one == first for one in others)
    assert any(len(bucket) > 1 for plan in first for bucket in plan)


def scalars(rank, world_size):
    """Gathers of scalars, of a row, and of nothing."""
    name = group_of(device_mesh((2,), ("dp",)), "dp").process_group.group_name
    ops = torch.ops._c10d_functional

    def function(*inputs):
        started = [ops.all_gather_into_tensor(x, world_size, name) for x in inputs]
        return [ops.wait_tensor(one) for one in started]

    shapes = [(), (1,), (), (0, 3)]
    inputs = [torch.full(shape, float(rank + at)) for at, shape in enumerate(shapes)]
    module = make_fx(function, tracing_mode="fake")(*inputs)
    torch.manual_seed(3)
    made = check(module, inputs, (module(*inputs), torch.get_rng_state()))
    assert len(made.buckets) == 1


def test_scalars_are_gathered_together():
    simulate(2).run(scalars)
