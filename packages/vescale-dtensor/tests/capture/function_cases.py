"""Custom autograd.Functions, on plain tensors or DTensors."""

import torch
from torch.autograd import Function


class Scaled(Function):
    """Its gradient is another one than autograd's."""

    @staticmethod
    def forward(ctx, x, power=1.0):
        ctx.save_for_backward(x)
        return (x * 2.0) ** power

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        gradient = gradient * 3 + x * 2.0
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


class Viewed(Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, gradient: -gradient)


class Nested(Function):
    forward = staticmethod(lambda ctx, x: Scaled.apply(x) * 2)
    backward = staticmethod(lambda ctx, gradient: gradient * 7)


class Returned(Function):
    forward = staticmethod(lambda ctx, x: x)
    backward = staticmethod(lambda ctx, gradient: -gradient)


class Written(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x.mul_(2))
        return x

    backward = staticmethod(lambda ctx, gradient: gradient * 2)


class Gathered(Function):
    """Gives plain tensors for DTensors."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.full_tensor().sum(0)

    backward = staticmethod(lambda ctx, gradient: gradient.expand(ctx.shape))
