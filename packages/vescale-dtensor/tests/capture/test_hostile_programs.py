"""No program of a captured function is replayed with what is old, however a call comes by it.

Each program runs beside a twin, three times before and three times after each of its changes:
results, what the caller does with them, and what is left behind are those of eager mode to the bit.
"""

import copy
import threading
import types
import warnings

import pytest
import torch
import vescale_dtensor as vd
from capture_guards import line, rows, spread
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten
from vescale_comm import simulate
from vescale_comm.testing import run
from vescale_dtensor import Replicate

CALLS = 3


def plain(tree):
    """The values of a result, as they are now."""
    leaves = tree_flatten(tree)[0]
    return [v.to_local().clone() if isinstance(v, vd.DTensor) else v for v in leaves]


def alike(one, two):
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(map(alike, one, two))
    return one == two


class Twin:
    """A function with state of its own."""

    def __init__(self, make, wrap):
        torch.manual_seed(0)
        function, self.changes, *more = make()
        self.given, self.use = (*more, *(one, as_it_is)[len(more) :])
        self.function = wrap(function)

    def call(self, seed):
        torch.manual_seed(seed)
        found = self.use(self.function(*self.given(seed)))
        return plain(found), torch.get_rng_state()


def one(seed):
    return (spread(rows(seed=seed)),)


def as_it_is(result):
    return result


def verdict(make):
    """Right, or refused; or what is stale."""
    eager, captured = Twin(make, lambda function: function), Twin(make, vd.capture)
    for step in range(len(eager.changes) + 1):
        for call in range(CALLS):
            expected = eager.call(10 * step + call)
            try:
                found = captured.call(10 * step + call)
            except vd.CaptureError:
                return "refused"
            if not alike(list(found), list(expected)):
                return f"stale after {step} changes, call {call}"
        if step < len(eager.changes):
            eager.changes[step]()
            captured.changes[step]()
    return "right"


# --- what goes in and comes out


class Slotted:
    __slots__ = ("count", "x")

    def __init__(self, x, count):
        self.x, self.count = x, count


def nothing():
    pass


def fresh_list():
    return (lambda x: [x * 2, 1]), [nothing], one, lambda result: [*result, result.append(5)]


def fresh_nested():
    def use(result):
        result["meta"]["sizes"].append(1)
        return result

    return (lambda x: {"y": x * 2, "meta": {"sizes": [1]}}), [nothing], one, use


def outside_list():
    tags = ["a"]
    return (lambda x: (x * 2, tags)), [lambda: tags.append("b"), nothing]


def outside_tensor():
    weight = spread(torch.ones(4), Replicate())
    use = lambda result: (result[0], result[1].add_(1))  # noqa: E731
    return (lambda x: (x * weight, weight)), [lambda: weight.mul_(3), nothing], one, use


def argument_returned():
    use = lambda result: (result[0].add_(1), result[1])  # noqa: E731
    return (lambda x: (x, x * 2)), [nothing], one, use


def returned_twice():
    def both(x):
        y = x * 2
        return y, y

    return both, [nothing], one, lambda result: (result[0].add_(1), result[1])


def slotted_batches():
    def given(seed):
        return (Slotted(*one(seed), 1 + seed // 10),)

    return (lambda b: b.x * b.count), [nothing, nothing], given


def changed_arguments():
    def function(x, found):
        found.append(1)
        return x * len(found)

    return function, [nothing], lambda seed: (*one(seed), [])


def errors_by_state():
    state = types.SimpleNamespace(bad=False)

    def function(x):
        y = x * 2
        if state.bad:
            raise ValueError("bad")
        return y

    def caught(x):
        try:
            return captured(x)
        except ValueError:
            return x * 5

    captured = vd.capture(function)
    changes = [lambda: setattr(state, "bad", True), lambda: setattr(state, "bad", False)]
    return caught, changes


def decorated_methods():
    class Model:
        factor = 2.0

        @vd.capture
        def step(self, x):
            return x * self.factor

    ones = [Model(), Model()]
    ones[1].factor = 3.0
    plainly = lambda x: [one.step(x) for one in ones]  # noqa: E731
    return plainly, [lambda: setattr(Model, "factor", 5.0), lambda: setattr(ones[0], "factor", 7.0)]


PROGRAMS = {
    each.__name__: each
    for each in (
        *(fresh_list, fresh_nested, outside_list, outside_tensor, argument_returned),
        *(returned_twice, slotted_batches),
        *(changed_arguments, errors_by_state, decorated_methods),
    )
}


REFUSED = {"changed_arguments"}


def all_of(rank, world_size, programs):
    return {name: verdict(make) for name, make in programs.items()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_right_or_refused(name):
    found = simulate(2)(all_of, {name: PROGRAMS[name]})
    # Most of them can be replayed, so refusing more would be no answer.
    assert found == [{name: "refused" if name in REFUSED else "right"}] * 2


# --- functions that change what a call is


def dual(x):
    with forward_ad.dual_level():
        made = forward_ad.make_dual(torch.ones(4), torch.ones(4))
        return x * forward_ad.unpack_dual(made * 2).tangent


def faked(x):
    with FakeTensorMode():
        count = torch.ones(3).shape[0]
    return x * count


def twice(t):
    return (t * t).sum()


TRANSFORMED = {
    "grad": lambda x: x * torch.func.grad(twice)(torch.ones(4)),
    "vmap": lambda x: x * torch.vmap(lambda t: t * 2)(torch.ones(4)),
    "jvp": lambda x: x * torch.func.jvp(twice, (torch.ones(4),), (torch.ones(4),))[1],
    "jacrev": lambda x: x * torch.func.jacrev(lambda t: t * 2)(torch.ones(4)).sum(0),
    "hessian": lambda x: x * torch.func.hessian(twice)(torch.ones(4)).sum(0),
    "forward mode": dual,
    "fake tensors": faked,
    "make_fx": lambda x: x * make_fx(lambda t: t * 2)(torch.ones(4))(torch.ones(4)),
    "sparse": lambda x: x * torch.eye(4).to_sparse().to_dense().sum(0),
}


def transformed(rank, world_size):
    warnings.simplefilter("ignore")  # torch's own, of torch.jit in forward mode
    for name, function in TRANSFORMED.items():
        with pytest.raises(vd.CaptureError, match=r"is active|is not strided|gives Python a tuple"):
            vd.capture(function)(*one(0))
        run_on = vd.capture(function, refused="run")
        for seed in range(CALLS):
            assert torch.equal(run_on(*one(seed)).to_local(), function(*one(seed)).to_local()), name


def around(rank, world_size):
    """Where a transform runs around it, a captured function is what it is without capture."""
    warnings.simplefilter("ignore")  # torch's own, of torch.jit in forward mode
    captured = vd.capture(torch.mul)
    for seed in range(CALLS):
        captured(one(seed)[0], torch.ones(4))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(4), torch.ones(4))
        with pytest.raises(vd.UnsupportedError, match="its derivative would end there"):
            captured(one(0)[0], dual)
    # Of plain tensors, one of them from outside.
    outside = [torch.ones(4)]
    captured = vd.capture(lambda t: (t * outside[0]).sum())
    for _ in range(CALLS):
        captured(torch.ones(4))

    def of_outside(t):
        outside[0] = t
        return captured(torch.full((4,), 3.0))

    assert torch.equal(torch.func.grad(of_outside)(torch.ones(4)), torch.full((4,), 3.0))


class Output(types.SimpleNamespace):
    pass


def namespaces(rank, world_size):
    """Results and arguments in namespaces, which `object` cannot make."""

    def function(batch, kind):
        return kind(loss=batch.x * batch.scale, batch=batch, more=types.SimpleNamespace(a=batch.x))

    captured = vd.capture(function)
    for kind in (types.SimpleNamespace, Output):
        for seed in range(CALLS):
            batch = types.SimpleNamespace(x=one(seed)[0], scale=2.0)
            found = captured(batch, kind)
            assert type(found) is kind
            assert list(vars(found)) == ["loss", "batch", "more"]
            assert found.batch is batch
            assert found.more.a is batch.x
            assert torch.equal(found.loss.to_local(), (batch.x * 2.0).to_local())
    assert captured.replays == 2 * (CALLS - 1)


def copied(rank, world_size):
    """A copy has programs of its own; and a captured function stays what it is."""
    model = vd.distribute_module(nn.Linear(4, 3), line())
    captured = vd.capture(model)
    for seed in range(CALLS):
        captured(*one(seed))
    other = copy.deepcopy(captured)
    assert other.function is not model
    assert not other.programs
    with torch.no_grad():
        other.function.weight.mul_(3)
    for seed in range(CALLS):
        for each in (captured, other):
            assert torch.equal(each(*one(seed)).to_local(), each.function(*one(seed)).to_local())
    with pytest.raises(AttributeError):
        captured.function = other.function


def threads(rank, world_size):
    """Threads that call one function get their own results."""
    weight = torch.ones(4)
    captured = vd.capture(lambda x, k: x * weight * k)
    given, wrong = [one(seed)[0] for seed in range(4)], []

    def call(start):
        for step in range(40):
            x, factor = given[(start + step) % 4], float((start + step) % 3)
            if not torch.equal(captured(x, factor).to_local(), x.to_local() * factor):
                wrong.append(step)

    several = [threading.Thread(target=call, args=(start,)) for start in range(3)]
    for each in several:
        each.start()
    for each in several:
        each.join()
    assert not wrong
    assert captured.replays


@pytest.mark.parametrize(
    "case", [transformed, around, namespaces, copied], ids=lambda case: case.__name__
)
def test_functions_of_functions(case):
    simulate(2)(case)


def test_threads():
    run(threads, 2)
