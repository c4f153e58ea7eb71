"""Custom autograd.Functions that return plain tensors for DTensors, as kernels of libraries do."""

import torch
import vescale_dtensor as vd
from torch.autograd.function import once_differentiable


def gathered(x):
    return x.full_tensor() if isinstance(x, vd.DTensor) else x


class Chunked(torch.autograd.Function):
    """The log of the sum of exponentials of x @ w.t(), by rows in chunks, and a mean of it."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.set_materialize_grads(False)
        result = torch.zeros(len(x))
        buffer = torch.empty(2, len(w))
        for start in range(0, len(x), 2):
            chunk = x[start : start + 2]
            tile = buffer[: len(chunk)]
            torch.mm(chunk, w.t(), out=tile)
            result[start : start + 2].copy_(tile.logsumexp(1))
        ctx.save_for_backward(x, w, result)
        return result, result.mean()

    @staticmethod
    def backward(ctx, rows, mean):
        x, w, result = ctx.saved_tensors
        needs_x, needs_w = ctx.needs_input_grad
        scale = torch.zeros_like(result)
        if rows is not None:
            scale += rows
        if mean is not None:
            scale += mean / len(result)
        weights = (x @ w.t() - result[:, None]).exp() * scale[:, None]
        return weights @ w if needs_x else None, weights.t() @ x if needs_w else None


class Squares(torch.autograd.Function):
    """May be differentiated twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        total = torch.zeros(())
        total.add_((x * x).sum())
        return total

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x


class Several(torch.autograd.Function):
    """A plain tensor, one like its input, indices, numbers, and nothing."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        rows = torch.zeros(len(x)).add_(x.sum(1))
        largest = torch.zeros(len(x), dtype=torch.int64).copy_(x.argmax(1))
        fixed = torch.zeros(len(x)).copy_(x.amax(1))
        ctx.mark_non_differentiable(largest, fixed)
        return rows, x * factor, largest, fixed, "text", None, 3

    @staticmethod
    def backward(ctx, rows, scaled, *_):
        return rows[:, None] + scaled * ctx.factor, None


class Saved(torch.autograd.Function):
    """Saves what it returns, and a buffer beside."""

    @staticmethod
    def forward(ctx, x):
        result = torch.empty(x.shape).copy_(x.exp())
        ctx.save_for_backward(result, result.clone())
        return result

    @staticmethod
    def backward(ctx, grad):
        result, kept = ctx.saved_tensors
        return (kept + result) / 2 * grad


class WithContext(torch.autograd.Function):
    forward = staticmethod(lambda x, factor=3: torch.zeros(x.shape).copy_(x * factor))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    backward = staticmethod(lambda ctx, grad: (grad * ctx.factor, None))


class Decorated(Squares):
    @staticmethod
    @torch.no_grad()
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.zeros(()).add_((x * x).sum())


class Rebinding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        x, w = x.sum(0), w.sum(0)
        return torch.zeros(4).copy_(x * w)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return (grad * w.sum(0)).expand(x.shape), (grad * x.sum(0)).expand(w.shape)


class WithSizes(torch.autograd.Function):
    """Its context asks its result, which has no history yet."""

    forward = staticmethod(lambda x: torch.zeros(x.shape).copy_(x))

    @staticmethod
    def setup_context(ctx, inputs, output):
        assert isinstance(output, torch.Tensor)
        ctx.rows = (output * 0 + 1).sum(0)[0].item()

    backward = staticmethod(lambda ctx, grad: grad * ctx.rows)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tensor(x.sin().sum().item())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return gathered(grad * x.cos())


class Outer(torch.autograd.Function):
    """Calls another one."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Squares.apply(x) * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(Squares.apply(leaf) * 2, leaf, grad)
        return found


class Buffered(torch.autograd.Function):
    """Returns a plain tensor that it was given, and wrote into."""

    @staticmethod
    def forward(ctx, x, buffer):
        buffer.copy_(x * 2)
        ctx.mark_dirty(buffer)
        return buffer

    backward = staticmethod(lambda ctx, grad: (grad * 2, None))


class Beside(torch.autograd.Function):
    """Gives back a plain tensor, or a view of it, as it came in."""

    @staticmethod
    def forward(ctx, x, plain, view):
        ctx.save_for_backward(x)
        total = torch.zeros(()) + gathered(x).sum()
        return (plain.view_as(plain) if view else plain), total

    @staticmethod
    def backward(ctx, plain, total):
        (x,) = ctx.saved_tensors
        return torch.ones(x.shape) * total, plain * 2, None


class OfList(torch.autograd.Function):
    """Tensors in a list have no gradients."""

    @staticmethod
    def forward(ctx, x, others):
        ctx.factor = gathered(sum(o.sum() for o in others))
        return torch.zeros(x.shape).copy_(x * ctx.factor)

    backward = staticmethod(lambda ctx, grad: (grad * ctx.factor, None))


class View(torch.autograd.Function):
    """Returns a part of its buffer."""

    @staticmethod
    def forward(ctx, x):
        buffer = torch.zeros(8, 4)
        buffer[:5] = x
        ctx.save_for_backward(buffer)
        return buffer[1:4]

    @staticmethod
    def backward(ctx, grad):
        found = torch.zeros(5, 4)
        found[1:4] = grad
        return found


class Numbers(torch.autograd.Function):
    """Its results leave by other ways."""

    @staticmethod
    def forward(ctx, x, leave):
        ctx.shape = x.shape
        return leave(x)

    backward = staticmethod(lambda ctx, grad: (grad.expand(ctx.shape), None))
