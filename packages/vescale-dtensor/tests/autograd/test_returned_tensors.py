"""A custom autograd.Function may return any tensor, and every use of that has its gradient.

C++ gives what `apply` returns an autograd node, and tells nobody: not where the forward never
touched the tensor, which was made long before. Every way to make a tensor times every way to use
the result, twice each (the second time calls are compiled), against one device.
"""

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from on_mesh import on_mesh
from one_device import Place, differences, full_tensors
from torch.utils.checkpoint import checkpoint
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import Replicate, Shard

X = torch.linspace(0.5, 2, 24).reshape(6, 4)
OTHER = torch.linspace(-1, 1, 24).reshape(6, 4)


def _under_no_grad(place):
    with torch.no_grad():
        return place(OTHER) * 3


def _of_a_list(place):
    with torch.no_grad():
        return torch._foreach_mul([place(OTHER), place(OTHER)], 3.0)[1]


def _written(place):
    made = place(OTHER) + 1
    with torch.no_grad():
        made.mul_(3)
        torch._foreach_mul_([made], 2.0)
    return made


def _detached(place):
    with torch.enable_grad():
        return (place(OTHER, grad=True) * 2).detach()


MADE = {
    "op": lambda place: place(OTHER) * 3,
    "factory": lambda place: place(OTHER),
    "no grad": _under_no_grad,
    "foreach": _of_a_list,
    "written": _written,
    "detached": _detached,
    "view": lambda place: (place(OTHER) * 3).view(6, 4),
    "transposed": lambda place: (place(OTHER.t().contiguous()) * 3).t(),
    "replicated": lambda place: place(OTHER, dp=Replicate(), tp=Replicate()) * 3,
}


def _function(forward, backward, with_context=False):
    """A Function of a forward and a backward, in one of torch's two styles."""
    if with_context:
        body = {"forward": lambda *a: forward(None, *a), "setup_context": lambda ctx, i, o: None}
    else:
        body = {"forward": forward}
    body["backward"] = backward
    members = {name: staticmethod(function) for name, function in body.items()}
    return type("Returning", (torch.autograd.Function,), members)


def _several(x, made):
    used = _function(lambda ctx, x: (x * 2, made), lambda ctx, g, h: g * 5 + h * 7)
    first, second = used.apply(x)
    return second * 2 + first


def _several_of_which_one_is_used(x, made):
    used = _function(lambda ctx, x: (x * 2, made), lambda ctx, g, h: h * 7)
    return used.apply(x)[1]


def _written_to(x, made):
    # What is written to comes first: of a view, torch gives the gradients by position.
    def forward(ctx, c, x):
        ctx.mark_dirty(c)
        c.mul_(2)
        return c

    # The result is `made` from then on, and either name has the node.
    result = _function(forward, lambda ctx, g: (None, g * 5)).apply(made, x)
    return result * 2 + made


def _written_to_and_the_old_name_first(x, made):
    def forward(ctx, c, x):
        ctx.mark_dirty(c)
        c.copy_(x)
        return c

    result = _function(forward, lambda ctx, g: (None, g * 5)).apply(made, x)
    return made * 2 + result


def _without_gradient(x, made):
    def forward(ctx, x):
        ctx.mark_non_differentiable(made)
        return x * 2, made

    first, second = _function(forward, lambda ctx, g, h: g * 5).apply(x)
    return first + second


def _twice(x, made):
    once = _function(lambda ctx, x: made, lambda ctx, g: g * 5)
    again = _function(lambda ctx, y: y * 2, lambda ctx, g: g * 3)
    return again.apply(once.apply(x))


RETURNED = {
    "constant": lambda x, made: _function(lambda ctx, x: made, lambda ctx, g: g * 5).apply(x),
    "constant, with a context": lambda x, made: _function(
        lambda _, x: made, lambda ctx, g: g * 5, with_context=True
    ).apply(x),
    # The tensor is an argument that needs no gradient, and comes out as it is.
    "argument": lambda x, made: _function(lambda ctx, *a: a[1], lambda ctx, g: (g * 5, None)).apply(
        x, made
    ),
    "input": lambda x, made: _function(lambda ctx, x: x, lambda ctx, g: g * 5).apply(x) + made,
    "several": _several,
    "one of several": _several_of_which_one_is_used,
    "view": lambda x, made: _function(lambda ctx, x: made.view(6, 4), lambda ctx, g: g * 5).apply(
        x
    ),
    "marked dirty": _written_to,
    "marked dirty, old name": _written_to_and_the_old_name_first,
    "without gradient": _without_gradient,
    "two Functions": _twice,
}


def _local(y, w, x):
    if isinstance(y, vd.DTensor):
        local = y.to_local()
        return vd.DTensor.from_local(local * 2, y.device_mesh, y.placements, shape=y.shape)
    return y * 2


def _redistributed(y, w, x):
    return y.redistribute(placements=[Replicate(), Shard(0)]) if isinstance(y, vd.DTensor) else y


def _whole(y, w, x):
    return (y.full_tensor() if isinstance(y, vd.DTensor) else y) * 2


def _looked_at(y, w, x):
    with torch.no_grad():
        y.sum().item()
    return y * 2 if y.requires_grad and not y.is_leaf and y.grad_fn is not None else None


def _retained(y, w, x):
    y.retain_grad()
    (y * y).sum().backward(retain_graph=True)
    return y * y.grad


def _hooked(y, w, x):
    y.register_hook(lambda grad: grad * 2)
    return y * y


def _added_to(y, w, x):
    total = torch.zeros_like(x)
    total += y
    return total


def _written_outside(y, w, x):
    return y.mul_(2)


USES = {
    "number": lambda y, w, x: y * 2,
    "method": lambda y, w, x: y.exp(),
    "function": lambda y, w, x: F.gelu(y),
    "negated": lambda y, w, x: -y,
    "beside one without grad": lambda y, w, x: y + w.detach(),
    "behind one without grad": lambda y, w, x: w.detach() * y,
    "beside one with grad": lambda y, w, x: y * (x * 2),
    "behind one with grad": lambda y, w, x: (x * 2) * y,
    "itself": lambda y, w, x: y * y,
    "three": lambda y, w, x: torch.addcmul(w.detach(), y, y, value=2.0),
    "linear": lambda y, w, x: F.linear(y, w),
    "linear of nothing else": lambda y, w, x: F.linear(y, w.detach()),
    "linear, behind": lambda y, w, x: F.linear(w.detach(), y),
    "norm": lambda y, w, x: F.layer_norm(y, (4,)),
    "list": lambda y, w, x: torch.cat([w.detach(), y]),
    "foreach": lambda y, w, x: torch._foreach_mul([w.detach(), y], 2.0)[1],
    "where": lambda y, w, x: torch.where(w.detach() > 0, y, w.detach()),
    "index": lambda y, w, x: y[1:5],
    "view": lambda y, w, x: y.view(4, 6),
    "sum": lambda y, w, x: y.sum(0),
    "cast": lambda y, w, x: y.to(torch.float64).to(torch.float32),
    "dropout": lambda y, w, x: F.dropout(y, 0.5),
    "in place": _written_outside,
    "added to": _added_to,
    "to_local": _local,
    "full_tensor": _whole,
    "redistribute": _redistributed,
    "looked at": _looked_at,
    "retain_grad": _retained,
    "hook": _hooked,
    "checkpoint": lambda y, w, x: checkpoint(lambda t: t * t, y, use_reentrant=False),
    "detached": lambda y, w, x: y.detach() * x,
    "gradient": lambda y, w, x: torch.autograd.grad((y * y).sum(), y, retain_graph=True)[0] * y,
}


def _outcome(returned, made, use, place):
    """Values and gradients of one combination; or the type of the error."""
    x, w = place(X, grad=True), place(OTHER, grad=True)
    torch.manual_seed(0)
    try:
        result = use(returned(x, made(place)), w, x)
        (result * result).sum().backward()
    except RuntimeError as error:
        return type(error).__name__
    return full_tensors([result.requires_grad, result, x.grad, w.grad])


def _check(combinations):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    found, compared = [], 0
    for names in combinations:
        kind, way, use = names
        for _ in range(2):
            ours, dense = (
                _outcome(RETURNED[way], MADE[kind], USES[use], place)
                for place in (Place(mesh), Place())
            )
            if isinstance(dense, str):  # torch refuses some writes to views that we allow
                continue
            found += differences(ours, dense, " / ".join(names))
            compared += 1
    assert not found, "\n".join(found)
    return compared


REFUSED = [("in place", "argument"), ("in place", "view")]


@pytest.mark.parametrize("way", RETURNED)
@pytest.mark.parametrize("use", USES)
def test_gradients_of_what_functions_return(use, way):
    compared = simulate(4).run(lambda rank, world: _check([(kind, way, use) for kind in MADE]))
    # Most of them run on one device, which writes to no view that a Function returns.
    assert (min(compared) > len(MADE)) == ((use, way) not in REFUSED)


def test_checkpoint_of_a_result_without_another_use():
    """A checkpoint saves what it is given, and C++ hands out another object of it."""

    def program(place):
        x = place(X, grad=True)
        y = _function(lambda ctx, x: x * 2, lambda ctx, g: g * 5).apply(x)
        checkpoint(lambda t: t * t, y, use_reentrant=False).sum().backward()
        return x.grad

    def ours(mesh):
        assert not differences(*(full_tensors(program(p)) for p in (Place(mesh), Place())))

    on_mesh((2, 2), ours, ("dp", "tp"))
