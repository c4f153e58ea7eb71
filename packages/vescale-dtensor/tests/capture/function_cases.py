"""Custom autograd.Functions that are given DTensors, and steps that apply them.

Each step takes a batch `x`, a weight `w` of [6, 4] that tp cuts, and a replicated one `v` of [4].
"""

import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import nn
from torch.autograd import Function
from vescale_dtensor import Replicate, Shard


class Scaled(Function):
    """Reads a Python value; its gradient is another one than autograd's."""

    factor = 2.0

    @staticmethod
    def forward(ctx, x, power=1.0):
        ctx.save_for_backward(x)
        return (x * Scaled.factor) ** power

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        gradient = gradient * 3 + x * Scaled.factor
        return gradient if len(ctx.needs_input_grad) == 1 else (gradient, None)


class Pair(Function):
    """Two results, and a context that is set up apart."""

    forward = staticmethod(lambda x, y, shift: (x * y + shift, (x + y).sin()))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, one, two):
        x, y = ctx.saved_tensors
        return one * y + two, one * x - two, None


class Masked(Function):
    """Draws random numbers."""

    @staticmethod
    def forward(ctx, x):
        mask = torch.rand_like(x)
        ctx.save_for_backward(mask)
        return x * mask

    backward = staticmethod(lambda ctx, gradient: gradient * ctx.saved_tensors[0])


class Linear(Function):
    """Communicates where its operands are cut, forward and backward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w, gradient.t() @ x


class Summed(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.sum()

    backward = staticmethod(lambda ctx, gradient: gradient.expand(ctx.shape) * 1.0)


class Viewed(Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, gradient: -gradient)


class Cubed(Function):
    """Is differentiated twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    backward = staticmethod(lambda ctx, gradient: 3 * ctx.saved_tensors[0] ** 2 * gradient)


class Nested(Function):
    forward = staticmethod(lambda ctx, x: Scaled.apply(x) * 2)
    backward = staticmethod(lambda ctx, gradient: gradient * 7)


class Exponential(Function):
    """Saves its result."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    backward = staticmethod(lambda ctx, gradient: gradient * ctx.saved_tensors[0])


class Returned(Function):
    forward = staticmethod(lambda ctx, x: x)
    backward = staticmethod(lambda ctx, gradient: -gradient)


class Gathered(Function):
    """Gives plain tensors."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.full_tensor().sum(0)

    backward = staticmethod(lambda ctx, gradient: gradient.expand(ctx.shape))


class Listed(Function):
    forward = staticmethod(lambda ctx, tensors: tensors[0] * 2)
    backward = staticmethod(lambda ctx, gradient: None)


PLAIN = torch.arange(4.0)


def second(x):
    (gradient,) = torch.autograd.grad(Cubed.apply(x).sum(), x, create_graph=True)
    return Cubed.apply(x) * gradient


def without_grad(x):
    with torch.no_grad():
        return Scaled.apply(x) + 1


def used_three_times(h, w):
    """By a Function, an op that leaves a cache on it, and a Function again."""
    return Linear.apply(h, w) + F.linear(h, w) + Linear.apply(h, w)


def partial_sum(x, w):
    return Scaled.apply(F.linear(F.linear(x, w), w.t()))


def one_after_the_other(y):
    return Pair.apply(Scaled.apply(y), y, 1.0)[0]


REPLAYED = {
    "of an argument": lambda x, w, v: Scaled.apply(x) * v,
    "a default": lambda x, w, v: Scaled.apply(x * v, 2.0),
    "of a parameter": lambda x, w, v: x * Scaled.apply(v),
    "of a parameter twice": lambda x, w, v: x * Scaled.apply(v) + v * Scaled.apply(v),
    "of a parameter that varies": lambda x, w, v: x * v + Scaled.apply(v),
    "two results": lambda x, w, v: sum(Pair.apply(x * v, x.sin(), 2.0)),
    "random numbers": lambda x, w, v: Masked.apply(x * v) * torch.rand(4),
    "of what is cut": lambda x, w, v: Linear.apply(x, w),
    "after a use": lambda x, w, v: Linear.apply(x * v, w) + F.linear(x * v, w),
    "between uses": lambda x, w, v: used_three_times(x * v, w),
    "a number": lambda x, w, v: Summed.apply(x * v),
    "a view": lambda x, w, v: Viewed.apply(x * v) * 2,
    "a chain": lambda x, w, v: Viewed.apply(Scaled.apply(x * v)).cos(),
    "a chain that sums": lambda x, w, v: Summed.apply(Linear.apply(Scaled.apply(x * v), w)),
    "one inside of another": lambda x, w, v: Nested.apply(x * v),
    "second derivatives": lambda x, w, v: second(x * v),
    "without a gradient": lambda x, w, v: Scaled.apply((x * v).detach()) + x * v,
    "without grad": lambda x, w, v: x * v + without_grad(x * v),
    "not used": lambda x, w, v: (Scaled.apply(x * v), x * v)[1],
    "saves its result": lambda x, w, v: Exponential.apply(x * v * 0.1),
    "with a plain tensor": lambda x, w, v: Pair.apply(x * v, PLAIN, 1.0)[0],
    "of a partial sum": lambda x, w, v: partial_sum(x * v, w),
}

REFUSED = {
    "Returned, returns one of its arguments": lambda x, w, v: Returned.apply(x * v) * 2,
    "Gathered, is given DTensors and returns plain": lambda x, w, v: Gathered.apply(x * v) * 2,
    "Listed, is given DTensors in a list": lambda x, w, v: Listed.apply([x * v]) + v,
    "that the other one was given, too": lambda x, w, v: one_after_the_other(x * v),
    "a leaf that the function makes": lambda x, w, v: Scaled.apply(x.detach().requires_grad_()) * v,
}

LAYOUTS = {
    "rows over dp": [Shard(0), Replicate()],
    "replicated": [Replicate(), Replicate()],
    "cut over both": [Shard(0), Shard(1)],
}


class Steps:
    """Training steps of one case, with weights of their own.

    Args:
        case: what is applied.
        where: the backward, `"inside"` of what is captured or `"outside"`, or the loss as well.
        wrap: captures, or does not.
    """

    def __init__(self, case, where, wrap=lambda step: step):
        self.mesh = vd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        self.w = self.weight(torch.randn(6, 4), [Replicate(), Shard(0)])
        self.v = self.weight(torch.randn(4), [Replicate(), Replicate()])
        self.where, self.case = where, case
        self.step = wrap(getattr(self, where))

    def weight(self, value, placements):
        return nn.Parameter(vd.distribute_tensor(value, self.mesh, placements, src_data_rank=None))

    def inside(self, x):
        self.w.grad = self.v.grad = None
        loss = self.case(x, self.w, self.v).square().sum()
        loss.backward()
        return loss.detach()

    def outside(self, x):
        return self.case(x, self.w, self.v).square().sum()

    def forward_alone(self, x):
        return self.case(x, self.w, self.v)

    def run(self, seed, layout):
        """One step: loss, gradients and where the generator stands."""
        torch.manual_seed(100 + seed)
        x = vd.distribute_tensor(torch.randn(6, 4), self.mesh, layout, src_data_rank=None)
        if self.where != "inside":
            self.w.grad = self.v.grad = None
        found = self.step(x)
        if self.where != "inside":
            found = found if self.where == "outside" else found.square().sum()
            found.backward()
        gradients = [None if p.grad is None else whole(p.grad) for p in (self.w, self.v)]
        return [whole(found.detach()), *gradients, torch.rand(())]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, vd.DTensor) else tensor
