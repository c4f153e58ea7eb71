"""A call that took the long road once is answered alike by the short one, also when watched.

A rule that is registered later is asked, whichever way a call takes: no cache outlives it. And a
compiled call answers calls of equal values only: 1, 1.0 and True are three values.
"""

from __future__ import annotations

import logging
from collections import Counter
from types import BuiltinFunctionType, MethodDescriptorType

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from on_mesh import on_mesh
from vescale_comm import simulate
from vescale_comm.testing import device_mesh, on_ranks, run
from vescale_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from vescale_dtensor._dispatch.registry import known_rules
from vescale_dtensor._fast_path import lookup
from vescale_dtensor._planning.plan import Rule
from vescale_dtensor._torch.schemas import wrong_flags


def a_plain_operand_before_a_sharded_one(rank, world_size):
    mesh = device_mesh((4,))
    index, table = torch.tensor([[0, 5, 2], [6, 6, 1]]), torch.randn(7, 3)
    wanted = F.embedding(index, table)
    cut = vd.distribute_tensor(table, mesh, [Shard(0)])
    for _ in range(5):  # a plain operand is compared at first; then the call is remembered
        assert torch.equal(F.embedding(index, cut).full_tensor(), wanted)


def twice(x):
    """A partial sum that is used by itself after its total was needed."""
    return x.relu() + x * 2


def what_is_observed_is_what_runs(rank, world_size):
    mesh = device_mesh((4,))
    leaf = torch.ones(3, requires_grad=True)

    def partial():
        return vd.DTensor.from_local(leaf * 1, mesh, [Partial()])

    plain = [twice(partial()) for _ in range(3)][-1]
    with vd.explain() as report:
        seen = twice(partial())
    assert seen.placements == plain.placements == (Replicate(),)
    assert [bool(record.bytes) for record in report.records if record.op != "redistribute"] == [
        True,
        False,
        False,
    ]


def a_plain_tensor_that_is_indexed_and_a_tuple_of_one(rank, world_size):
    mesh = device_mesh((4,))
    table, index = torch.randn(7, 3), torch.tensor([6, 0, 2, 6, 1])
    cut = vd.distribute_tensor(index, mesh, [Shard(0)])
    row = vd.distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    for _ in range(5):
        assert torch.equal(table[cut].full_tensor(), table[index])
        # What is moved first, and comes back as a tuple of one.
        (slope,) = torch.gradient(row, spacing=0.5)
        assert torch.equal(slope.full_tensor(), torch.full((6,), 2.0))


def a_plain_tensor_whose_size_is_that_of_a_mesh(rank, world_size):
    mesh = device_mesh((4,))
    table = torch.arange(15.0).reshape(5, 3)
    count = vd.distribute_tensor(torch.tensor(2), mesh, [Replicate()])
    for _ in range(3):
        assert torch.equal(table.narrow(0, count, 2), table.narrow(0, 2, 2))
        assert len(torch.tensor_split(table, count)) == 2
        with vd.explain():
            assert torch.equal(torch.narrow(table, 0, count, 2), table[2:4])


FOUR_RANKS = (
    a_plain_operand_before_a_sharded_one,
    what_is_observed_is_what_runs,
    a_plain_tensor_that_is_indexed_and_a_tuple_of_one,
    a_plain_tensor_whose_size_is_that_of_a_mesh,
)


@pytest.mark.parametrize("program", FOUR_RANKS)
def test_four_ranks(program):
    run(program, 4)


@on_ranks(1)
def test_a_layer_without_bias_is_looked_up_without_grad():
    mesh = device_mesh((1,))
    weight = vd.distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()
    x, other = (vd.distribute_tensor(torch.randn(n, 4), mesh, [Replicate()]) for n in (3, 2))
    walked = []
    with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        for _ in range(3):
            expected = F.linear(x, weight, None)
        patched.setattr(lookup, "_general_call", lambda func, *_: walked.append(func))
        found = F.linear(x, weight, None)
        assert walked == []
        F.linear(other, weight, None)
        assert walked == [F.linear]
    assert torch.equal(found.to_local(), expected.to_local())


asked = Counter()


def _counting(func):
    """The rule of a function, which counts who asks it."""
    rule = known_rules()[func]

    def strategy(call):
        asked[func] += 1
        return rule.strategy(call)

    return Rule(f"{rule.name}, counted", strategy, rule.reads, rule.writes, rule.views)


def _in_lists(func, *others):
    """As optimizers call it; only then is a call on lists known from before."""

    def call(x, y):
        with torch.no_grad():
            return func([x, y], *others)

    return call


ROADS = {
    "a method": (lambda x, y: x.mul(y), torch.Tensor.mul),
    "an operator": (lambda x, y: x * y, torch.Tensor.mul),
    "a function": (lambda x, y: torch.mul(x, y), torch.mul),
    "by name": (lambda x, y: torch.mul(input=x, other=y), torch.mul),
    "a scalar": (lambda x, y: x * 2.0, torch.Tensor.mul),
    # What is done to each element has the rule.
    "lists": (_in_lists(torch._foreach_mul, 2.0), torch.Tensor.mul),
    "lists in place": (_in_lists(torch._foreach_mul_, 1.0), torch.Tensor.mul_),
    "lists, recorded": (lambda x, y: torch._foreach_mul([x, y], 2.0), torch.Tensor.mul),
    "norms of lists": (_in_lists(torch._foreach_norm), torch.linalg.vector_norm),
    "a sum": (lambda x, y: x.sum(0), torch.Tensor.sum),
}


def _asks_again(rank, world_size, name):
    call, func = ROADS[name]
    mesh = device_mesh((1,))
    x, y = (vd.distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]) for _ in range(2))
    for _ in range(4):
        call(x, y)
    own = known_rules()[func]
    try:
        vd.register_rule(func, _counting(func))
        asked.clear()
        call(x, y)
        assert asked[func] >= 1
    finally:
        vd.register_rule(func, own)
    asked.clear()
    call(x, y)
    assert not asked


@pytest.mark.parametrize("name", ROADS)
def test_a_rule_registered_after_calls_is_asked(name):
    logging.disable(logging.WARNING)
    try:
        simulate(1)(_asks_again, name)
    finally:
        logging.disable(logging.NOTSET)


X = torch.arange(24.0).reshape(4, 6) / 7
KINDS = (int, float, bool, torch.tensor)
CALLS = {
    "flatten": lambda x, n: x.flatten(n(0)),
    "flatten, named": lambda x, n: x.flatten(start_dim=n(0)),
    "transpose": lambda x, n: x.transpose(dim0=n(0), dim1=1),
    "permute": lambda x, n: x.permute((n(1), n(0))),
    "permute, named": lambda x, n: x.permute(dims=(n(1), n(0))),
    "unsqueeze": lambda x, n: x.unsqueeze(dim=n(0)),
    "expand": lambda x, n: x[:1].expand((n(1), 6)),
    "chunk": lambda x, n: x.chunk(chunks=n(1), dim=n(0)),
    "split": lambda x, n: x.split(split_size=2, dim=n(0)),
    "narrow": lambda x, n: x.narrow(dim=n(0), start=n(0), length=n(1)),
    "select": lambda x, n: x.select(dim=n(0), index=n(1)),
    "sum": lambda x, n: x.sum(n(0), n(1)),
    "sum, named": lambda x, n: x.sum(dim=n(1), keepdim=n(1)),
    "mean": lambda x, n: x.mean(dim=(n(0), n(1))),
    "mean, kept": lambda x, n: x.mean(0, n(1)),
    "amax": lambda x, n: x.amax(dim=0, keepdim=n(1)),
    "amax of two": lambda x, n: x.amax(dim=(n(0), n(1))),
    "argmax": lambda x, n: x.argmax(dim=0, keepdim=n(1)),
    "var": lambda x, n: x.var(dim=0, unbiased=n(1)),
    "var, kept": lambda x, n: x.var((0,), keepdim=n(1)),
    "logsumexp": lambda x, n: x.logsumexp(0, n(1)),
    "softmax": lambda x, n: x.softmax(dim=n(1)),
    "cumsum": lambda x, n: x.cumsum(dim=n(1)),
    "topk": lambda x, n: x.topk(1, dim=0, largest=n(1)),
    "sort": lambda x, n: x.sort(dim=n(0), descending=n(1)),
    "add": lambda x, n: x.add(n(1), alpha=n(1)),
    "clamp": lambda x, n: x.clamp(min=n(0), max=n(1)),
    "permute, a list": lambda x, n: x.permute([n(1), n(0)]),
    "sum, a list": lambda x, n: x.sum(dim=[n(0)], keepdim=True),
    "softmax with a dtype": lambda x, n: x.softmax(n(1), dtype=torch.float64),
    "sum with a dtype, named": lambda x, n: x.sum(dim=n(1), keepdim=n(1), dtype=torch.float64),
    "mean of a tuple with a dtype": lambda x, n: x.mean((n(0), n(1)), False, dtype=torch.float64),
    "index": lambda x, n: x[n(0)],
    "slice": lambda x, n: x[n(0) : n(1)],
    "slices": lambda x, n: x[:, n(0) : n(1)],
    "a tuple that indexes": lambda x, n: x[(n(0), n(1), n(1), n(0)),],
}


def answer(call, x, kind):
    try:
        found = call(x, kind)
    except (TypeError, RuntimeError, IndexError):
        return "refused"
    parts = found if isinstance(found, tuple | list) else (found,)
    return [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]


@pytest.mark.parametrize("name", CALLS)
def test_values_of_other_types(name):
    call = CALLS[name]
    expected = {kind: answer(call, X, kind) for kind in KINDS}

    def run(mesh):
        for placement in (Replicate(), Shard(0), Shard(1)):
            x = distribute_tensor(X, mesh, [placement])
            # In another order the second time: whichever came first may have been compiled.
            for kind in (*KINDS, *KINDS, *reversed(KINDS)):
                found = answer(call, x, kind)
                context = f"{name} with {kind.__name__}, {placement}"
                assert (found == "refused") == (expected[kind] == "refused"), (context, found)
                if found != "refused":
                    torch.testing.assert_close(found, list(expected[kind]), msg=context)

    on_mesh((2,), run)


def test_two_tensors_of_which_one_should_be_a_boolean_are_refused_by_torch():
    # Before they come to a rule, so that `refuses_flags` need not read schemas for two tensors.
    asked = (BuiltinFunctionType, MethodDescriptorType)
    functions = [func for func in known_rules() if isinstance(func, asked)]
    wrong = [f for f in functions for n in (1, 2) if wrong_flags(f, (X,) * n, {})]
    kept = [f for f in (torch.cholesky, torch.svd, torch.qr) if isinstance(f, asked)]
    assert {f.__name__ for f in kept} <= {f.__name__ for f in wrong}
    assert torch.svd in kept  # the others only raise from torch 2.15 on

    def run(rank, world_size):
        x = distribute_tensor(torch.eye(2), init_device_mesh("cpu", (2,)), [Replicate()])
        for func in wrong:
            with pytest.raises(TypeError, match="bool"):
                func(x, x)

    simulate(2)(run)
