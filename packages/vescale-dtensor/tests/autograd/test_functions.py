"""Custom autograd.Functions get DTensors, forward and backward, and no gradient ends in them.

Their graph hangs on the wrappers; a bridge leads it to the local tensors. Where no bridge can be
built, it is an error. Every program here runs on one device and on dp=2 x tp=2, in four layouts.
"""

import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from named_cases import named_cases
from one_device import Place, check, differences, full_tensors
from torch import nn
from torch_library import network
from vescale_comm.testing import device_mesh, on_ranks, run
from vescale_dtensor import Replicate, Shard, UnsupportedError

X = torch.linspace(-1, 1, 24).reshape(6, 4)
W = torch.linspace(-1, 2, 16).reshape(4, 4)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x


class Exponential(torch.autograd.Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    backward = staticmethod(lambda ctx, grad: grad * ctx.saved_tensors[0])


class Reversal(torch.autograd.Function):
    """Returns its input."""

    forward = staticmethod(lambda ctx, x: x)
    backward = staticmethod(lambda ctx, grad: -grad)


class Alias(Reversal):
    forward = staticmethod(lambda ctx, x: x.view_as(x))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


class Mixer(torch.autograd.Function):
    """Backward is the first to look at what it saves."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return y * grad, x * grad


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx, first, second):
        x, y = ctx.saved_tensors
        return first * y + second, first * x + second


class WithIndices(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        largest = x.argmax(0)
        ctx.mark_non_differentiable(largest)
        return x * factor, largest

    backward = staticmethod(lambda ctx, grad, _: (grad * ctx.factor, None))


class WithContext(torch.autograd.Function):
    forward = staticmethod(lambda x, factor: x * factor)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    backward = staticmethod(lambda ctx, grad: (grad * ctx.factor, None))


class Buffered(torch.autograd.Function):
    """Writes into a tensor that it was given."""

    @staticmethod
    def forward(ctx, x, buffer):
        buffer.copy_(x)
        ctx.mark_dirty(buffer)
        return buffer

    backward = staticmethod(lambda ctx, grad: (grad * 2, None))


class Rounded(torch.autograd.Function):
    """A straight-through estimate, whose backward clamps."""

    forward = staticmethod(lambda ctx, x: (x * 3).round())
    backward = staticmethod(lambda ctx, grad: grad.clamp(-1, 1))


PROGRAMS = {
    "saves its input": lambda x, w: Square.apply(x),
    "before another op": lambda x, w: Square.apply(x) * 3,
    "chained": lambda x, w: Square.apply(Square.apply(x)),
    "chained with an op between": lambda x, w: Square.apply(Square.apply(x).sin()),
    "saves its output": lambda x, w: Exponential.apply(x),
    "saves its output, chained": lambda x, w: Exponential.apply(Exponential.apply(x)),
    "returns its input": lambda x, w: Reversal.apply(x) * x,
    "returns a view": lambda x, w: Alias.apply(x).sin(),
    "two results": lambda x, w: sum(r.sin() for r in Pair.apply(x, x.cos())),
    "one of two results": lambda x, w: Pair.apply(x, x.cos())[1],
    "a product": lambda x, w: Product.apply(x, w),
    "a product, used varyingly": lambda x, w: F.linear(Product.apply(x, w), w).tanh(),
    "an input of two in a chain": lambda x, w: Product.apply(Product.apply(x, w), w).softmax(1),
    "saves what forward leaves alone": lambda x, w: Mixer.apply(x * 1, x.sin()),
    "an integer result": lambda x, w: WithIndices.apply(x, 2.5)[0],
    "a context of its own": lambda x, w: WithContext.apply(x, 3),
    "writes into its input": lambda x, w: Buffered.apply(x, x.detach() * 0) * 2,
    "rounds": lambda x, w: Rounded.apply(x) * w[0],
}
LAYOUTS = {
    "both cut": ((Shard(0), Shard(1)), (Replicate(), Replicate())),
    "columns": ((Replicate(), Replicate()), (Replicate(), Shard(1))),
    "rows": ((Shard(0), Replicate()), (Replicate(), Shard(0))),
    "crossed": ((Replicate(), Shard(0)), (Shard(1), Replicate())),
}


def gradients(place, program, layouts, leaf):
    x, w = place(X, *layouts[0], grad=True), place(W, *layouts[1], grad=True)
    result = program(x if leaf else x * 1, w)
    seen = []
    result.register_hook(seen.append)
    result.square().sum().backward()
    return [result, seen[0], x.grad, None if w.grad is None else w.grad]


def second_gradients(place, program, layouts, leaf):
    x, w = place(X, *layouts[0], grad=True), place(W, *layouts[1], grad=True)
    value = program(x if leaf else x * 1, w).square().sum()
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    first.square().sum().backward()
    return [first, x.grad]


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(4, simulated=True)
def test_bridged(name):
    for layouts in LAYOUTS.values():
        for leaf in (True, False):
            for what in (gradients, second_gradients):
                check(lambda place: what(place, PROGRAMS[name], layouts, leaf))  # noqa: B023


class Total(torch.autograd.Function):
    """Gives plain tensors, of this rank's part: nobody can tell what their gradients are."""

    forward = staticmethod(lambda ctx, x, leave: leave(x))
    backward = staticmethod(lambda ctx, grad: (grad.expand(6, 4), None))


LEAVING = {
    "to_local": lambda x: x.to_local().sum(),
    "an op first": lambda x: (x * 2).to_local().sum(),
    "beside the whole": lambda x: x.full_tensor().sum() + x.to_local().sum(),
    "to_torch": lambda x: x.to_torch().full_tensor().sum(),
}


def leave(rank, world, name):
    place = Place(device_mesh((2, 2), ("dp", "tp")))
    made = (lambda x: x, lambda x: x * 1)
    for layouts in LAYOUTS.values():
        for make in made:
            if layouts[0] == (Replicate(), Replicate()):
                continue  # a part is the whole there
            x = place(X, *layouts[0], grad=True)
            used = make(x)
            (used * 2).sum().backward(retain_graph=True)
            with pytest.raises(UnsupportedError, match="returned plain tensors"):
                Total.apply(used, LEAVING[name]).backward()


@pytest.mark.parametrize("name", LEAVING)
def test_plain_results_of_a_part_are_an_error_in_backward(name):
    run(leave, 4, name)


CASES, case = named_cases()


@case
def a_leaf_notices_what_went_past_it(place):
    """Nothing of the forward touched its data, so only its gradient tells."""
    x = place(X, grad=True)
    (x * 2).sum().backward()
    Total.apply(x, lambda _: torch.ones(())).backward()
    with pytest.raises(UnsupportedError, match="returned plain tensors"):
        _ = x.grad


@case
def what_was_saved_must_not_change(place):
    x = place(X, grad=True) * 1
    result = Square.apply(x)
    (result * 1).sum().backward(retain_graph=True)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (result * 1).sum().backward()


@case
def a_plain_leaf_beside_dtensors_gets_the_complete_gradient(place):
    plain, x = W.clone().requires_grad_(), place(X, grad=True)
    Product.apply(x, plain).square().sum().backward()
    dense, y = W.clone().requires_grad_(), X.clone().requires_grad_()
    Product.apply(y, dense).square().sum().backward()
    assert not differences(full_tensors([plain.grad, x.grad]), [dense.grad, y.grad])
    with pytest.raises(UnsupportedError, match="plain tensor besides"):
        Product.apply(x, plain * 1).sum()


@case
def no_cycle_keeps_a_bridge_alive(place):
    x = place(X, grad=True)
    gc.collect()
    gc.disable()
    try:
        result = Square.apply(Exponential.apply(x * 1))
        used = result * 2
        used.sum().backward()
        watched = [weakref.ref(t) for t in (result, used, result._local_tensor)]
        del result, used
        assert [ref() for ref in watched] == [None] * 3
    finally:
        gc.enable()


@case
def without_grad_nothing_is_bridged(place):
    x = place(X, grad=True)
    with torch.no_grad():
        result = Square.apply(x)
    assert not result.requires_grad
    assert result.grad_fn is None
    assert torch.allclose(result.full_tensor(), X * X)


@case
def flags_are_right_before_and_after_the_first_use(place):
    x = place(X, grad=True)
    for result in (Square.apply(x), Reversal.apply(x * 1)):
        for _ in range(2):
            assert result.requires_grad
            assert not result.is_leaf
            assert "Backward" in result.grad_fn.name()
            result.sum()
    assert torch.autograd.grad(Square.apply(x).sum(), x)[0].placements == x.placements


@pytest.mark.parametrize("name", CASES)
@on_ranks(4)
def test_functions(name):
    CASES[name](Place(device_mesh((2, 2), ("dp", "tp"))))


class Attention(nn.Module):
    """Two inputs, and two outputs that want gradients."""

    def forward(self, query, key):
        weights = (query @ key.t()).softmax(-1)
        return weights @ key, weights


def hooked(place, register, grad):
    seen, model = [], network(place)
    register(model, seen)
    x = place(X, Shard(0), Replicate(), grad=grad)
    model(x).square().sum().backward()
    return [seen, [p.grad for p in model.parameters()], x.grad]


def hooked_attention(place, register):
    seen, model = [], Attention()
    register(model, seen)
    query, key = (place(t, Shard(0), Replicate(), grad=True) for t in (X, X.flip(0)))
    first, second = model(query * 1, key * 1)
    (first.square().sum() + second.sin().sum()).backward()
    return [seen, query.grad, key.grad]


def watch(model, seen):
    def hook(_, inputs, outputs):
        seen.append([inputs, outputs])

    for module in model.modules():
        module.register_full_backward_hook(hook)


def replace(model, seen):
    model.register_full_backward_hook(lambda m, inputs, outputs: tuple(g * 2 for g in inputs))


def before(model, seen):
    model.register_full_backward_pre_hook(lambda m, outputs: tuple(g * 3 for g in outputs))
    watch(model, seen)


MODULE_HOOKS = {
    "seen": lambda place: hooked(place, watch, True),
    "seen, input without grad": lambda place: hooked(place, watch, False),
    "replaced": lambda place: hooked(place, replace, True),
    "before": lambda place: hooked(place, before, True),
    "several inputs and outputs": lambda place: hooked_attention(place, watch),
    "several, replaced": lambda place: hooked_attention(place, replace),
    "several, before": lambda place: hooked_attention(place, before),
    "forward hooks": lambda place: hooked(
        place,
        lambda model, seen: model[0].register_forward_hook(lambda m, inputs, out: out * 2),
        True,
    ),
}


@pytest.mark.parametrize("name", MODULE_HOOKS)
@on_ranks(4)
def test_module_hooks_are_called_with_dtensors(name):
    with warnings.catch_warnings(action="ignore"):
        check(MODULE_HOOKS[name])


@torch.library.custom_op("vescale_test::twice", mutates_args=())
def twice(a: torch.Tensor) -> torch.Tensor:
    return a * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad * 2)


@on_ranks(4)
def test_a_custom_op_takes_the_fallback_and_keeps_its_gradient():
    place = Place(device_mesh((2, 2), ("dp", "tp")))
    ours = place(X, grad=True)
    result = twice(ours)
    assert isinstance(result, vd.DTensor)
    (result * ours).sum().backward()
    assert torch.allclose(ours.grad.full_tensor(), X * 4)
