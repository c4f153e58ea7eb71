"""Gradients are those of one device, complete where a user reads them, with the fewest collectives.

Every case runs on four processes, mesh dp=2 x tp=2, and compares with plain torch in the same
process. A case is a function of the mesh; it raises where it finds a difference.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch.utils.checkpoint import checkpoint
from vescale_comm import trace
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import Partial, Replicate, Shard, UnsupportedError

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def mesh22():
    return device_mesh((2, 2), ("dp", "tp"))


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sharded(tensor, mesh, dp, tp, grad=False):
    leaf = tensor.clone().requires_grad_(grad)
    return vd.distribute_tensor(leaf, mesh, [dp, tp], src_data_rank=None)


def close(ours, dense):
    whole = ours.full_tensor() if isinstance(ours, vd.DTensor) else ours
    torch.testing.assert_close(whole.detach(), dense.detach(), rtol=2e-5, atol=2e-6)


@case
def a_parameter_used_both_ways_on_different_axes(mesh):
    w, x, h = data(6, 6), data(8, 6, seed=1), data(5, 6, seed=2)
    dense = w.clone().requires_grad_()
    (F.linear(x, dense).square().sum() + F.linear(h, dense).sum()).backward()
    ours = sharded(w, mesh, Replicate(), Replicate(), grad=True)
    varying = F.linear(sharded(x, mesh, Shard(0), Replicate()), ours).square().sum()
    other = F.linear(sharded(h, mesh, Replicate(), Shard(0)), ours).sum()
    (varying + other).backward()
    assert ours.grad.placements == (Partial(), Partial())
    with trace() as traced:
        close(ours.grad, dense.grad)
    assert traced.counts() == {"all_reduce": 1}


@case
def an_activation_used_both_ways_owes_one_collective(mesh):
    x, weights = data(8, 6), [data(6, 6, seed=i) for i in range(1, 4)]
    dense = x.clone().requires_grad_()
    hidden = dense * 2
    sum(F.linear(hidden, w).square().sum() for w in weights).backward()
    ours = sharded(x, mesh, Shard(0), Replicate(), grad=True)
    hidden = ours * 2
    placed = [sharded(w, mesh, Replicate(), Shard(0)) for w in weights]
    loss = sum(F.linear(hidden, w).square().sum() for w in placed)
    with trace() as traced:
        loss.backward()
    assert traced.counts() == {"all_reduce": 1}
    close(ours.grad, dense.grad)


@case
def uses_on_tp_on_dp_and_on_both_owe_one_collective(mesh):
    x = data(6, 6)
    dense = x.clone().requires_grad_()
    hidden = dense.sin()
    ws = [data(6, 6, seed=i) for i in range(1, 4)]
    (sum((hidden @ w).square().sum() for w in ws) + hidden.sum()).backward()
    source = vd.DTensor.from_local(x.clone(), mesh, [Replicate(), Replicate()]).requires_grad_()
    hidden = source.sin()
    layouts = [(Replicate(), Shard(1)), (Shard(1), Replicate()), (Shard(0), Shard(1))]
    placed = [sharded(w, mesh, *places) for w, places in zip(ws, layouts, strict=True)]
    # The last one splits the contracted dim over dp: the hidden tensor is sliced there.
    loss = sum((hidden @ w).square().sum() for w in placed) + hidden.sum()
    loss.backward()
    close(source.grad, dense.grad)


@case
def uses_that_vary_on_different_axes_share_one_collective(mesh):
    x, ws = data(5, 6), [data(6, 6, seed=i) for i in range(1, 4)]
    dense = x.clone().requires_grad_()
    hidden = dense.sin()
    (sum((hidden @ w).square().sum() for w in ws) + hidden.sum()).backward()
    leaf = sharded(x, mesh, Replicate(), Replicate(), grad=True)
    hidden = leaf * 1
    layouts = [(Replicate(), Shard(1)), (Shard(1), Replicate()), (Shard(1), Shard(1))]
    placed = [sharded(w, mesh, *places) for w, places in zip(ws, layouts, strict=True)]
    once = hidden.sin()
    loss = sum((once @ w).square().sum() for w in placed) + once.sum()
    with trace() as traced:
        loss.backward()
    assert traced.counts() == {"all_reduce": 1}
    close(leaf.grad, dense.grad)


@case
def a_face_made_without_grad_is_not_reused_with_it(mesh):
    x, w = data(8, 6), data(6, 6, seed=1)
    ours = sharded(x, mesh, Replicate(), Replicate(), grad=True)
    hidden = ours * 1
    placed = sharded(w, mesh, Replicate(), Shard(0))
    with torch.no_grad():
        F.linear(hidden, placed)
    F.linear(hidden, placed).sum().backward()
    dense = x.clone().requires_grad_()
    F.linear(dense * 1, w).sum().backward()
    close(ours.grad, dense.grad)


@case
def inference_mode_then_training(mesh):
    w, x = data(6, 6), data(8, 6, seed=1)
    ours = sharded(w, mesh, Replicate(), Shard(0), grad=True)
    batch = sharded(x, mesh, Shard(0), Replicate())
    with torch.inference_mode():
        close(F.linear(batch, ours), F.linear(x, w))
    F.linear(batch, ours).sum().backward()
    dense = w.clone().requires_grad_()
    F.linear(x, dense).sum().backward()
    close(ours.grad, dense.grad)


@case
def frozen_then_unfrozen(mesh):
    w, x = data(6, 6), data(8, 6, seed=1)
    ours = sharded(w, mesh, Replicate(), Replicate(), grad=True)
    batch = sharded(x, mesh, Shard(0), Replicate())
    ours.requires_grad_(False)
    assert not F.linear(batch, ours).requires_grad
    ours.requires_grad_(True)
    F.linear(batch, ours).sum().backward()
    dense = w.clone().requires_grad_()
    F.linear(x, dense).sum().backward()
    close(ours.grad, dense.grad)


@case
def two_backwards_through_one_graph(mesh):
    w, x = data(6, 6), data(8, 6, seed=1)
    ours = sharded(w, mesh, Replicate(), Shard(0), grad=True)
    dense = w.clone().requires_grad_()
    loss = F.linear(sharded(x, mesh, Shard(0), Replicate()), ours).square().sum()
    want = F.linear(x, dense).square().sum()
    for value in (loss, want):
        value.backward(retain_graph=True)
        value.backward()
    close(ours.grad, dense.grad)


@case
def reading_the_total_between_accumulations_changes_nothing(mesh):
    w = data(6, 6)
    batches = [data(8, 6, seed=i) for i in range(1, 4)]
    ours, dense = sharded(w, mesh, Replicate(), Replicate(), grad=True), w.clone().requires_grad_()
    for x in batches:
        F.linear(sharded(x, mesh, Shard(0), Replicate()), ours).square().sum().backward()
        F.linear(x, dense).square().sum().backward()
        close(vd.gradient_total(ours), dense.grad)
        assert ours.grad.placements == (Replicate(), Replicate())
    kept = ours.grad
    assert kept is ours.grad


@case
def a_leaf_returned_as_it_is_stays_one_leaf(mesh):
    w, x = data(6, 6), data(8, 6, seed=1)
    ours, dense = sharded(w, mesh, Replicate(), Replicate(), grad=True), w.clone().requires_grad_()
    batch = sharded(x, mesh, Shard(0), Replicate())
    for _ in range(3):  # the first call, and calls that are known by then
        for parameter, inputs in ((ours, batch), (dense, x)):
            parameter.grad = None
            (F.linear(inputs, parameter.contiguous()).sum() + parameter.to("cpu").sum()).backward()
        close(ours.grad, dense.grad)


@case
def a_gradient_set_by_hand_accumulates_rightly(mesh):
    w, x = data(6, 6), data(8, 6, seed=1)
    ours, dense = sharded(w, mesh, Replicate(), Shard(0), grad=True), w.clone().requires_grad_()
    start = data(6, 6, seed=3)
    F.linear(sharded(x, mesh, Shard(0), Replicate()), ours).sum().backward()
    ours.grad = vd.distribute_tensor(start, mesh, [Replicate(), Shard(1)], src_data_rank=None)
    F.linear(sharded(x, mesh, Shard(0), Replicate()), ours).sum().backward()
    dense.grad = start.clone()
    F.linear(x, dense).sum().backward()
    close(ours.grad, dense.grad)


@case
def an_invariant_use_after_a_varying_step(mesh):
    w, x = data(6), data(8, 6, seed=1)
    ours, dense = sharded(w, mesh, Replicate(), Replicate(), grad=True), w.clone().requires_grad_()
    (ours * 3).sum().backward()
    (dense * 3).sum().backward()
    assert ours.grad.placements == (Replicate(), Replicate())
    (sharded(x, mesh, Shard(0), Replicate()) * ours).sum().backward()
    (x * dense).sum().backward()
    assert ours.grad.placements == (Partial(), Replicate())
    (ours * 3).sum().backward()
    (dense * 3).sum().backward()
    close(ours.grad, dense.grad)


@case
def autograd_grad_of_leaves_and_activations(mesh):
    w, x = data(6, 6), data(8, 6, seed=1)
    ours, dense = sharded(w, mesh, Replicate(), Shard(0), grad=True), w.clone().requires_grad_()
    batch = sharded(x, mesh, Shard(0), Replicate(), grad=True)
    inner = batch * 2
    whole = inner.redistribute(mesh, [Replicate(), Replicate()])
    out = F.linear(whole, ours).square().sum() + whole.sum()
    plain = x.clone().requires_grad_()
    plain_inner = plain * 2
    want = F.linear(plain_inner, dense).square().sum() + plain_inner.sum()
    got = torch.autograd.grad(out, [ours, inner, whole, batch], retain_graph=True)
    expected = torch.autograd.grad(want, [dense, plain_inner, plain_inner, plain])
    for mine, theirs in zip(got, expected, strict=True):
        close(mine, theirs)
    assert ours.grad is None


@case
def hooks_get_complete_gradients(mesh):
    w, x = data(6, 6), data(8, 6, seed=1)
    seen = {}
    placed = sharded(w, mesh, Replicate(), Shard(0), grad=True)
    placed.register_hook(lambda g: seen.__setitem__("leaf", g))
    placed.register_post_accumulate_grad_hook(lambda p: seen.__setitem__("after", p.grad))
    inner = sharded(x, mesh, Shard(0), Shard(1), grad=True) * 2
    whole = inner.redistribute(mesh, [Shard(0), Replicate()])
    whole.register_hook(lambda g: seen.__setitem__("gathered", g))
    inner.register_hook(lambda g: g * 1)
    inner.retain_grad()
    (F.linear(whole, placed).square().sum() + whole.sum()).backward()
    dense, plain = w.clone().requires_grad_(), x.clone().requires_grad_()
    plain_inner = plain * 2
    plain_inner.retain_grad()
    (F.linear(plain_inner, dense).square().sum() + plain_inner.sum()).backward()
    close(seen["leaf"], dense.grad)
    close(seen["after"], dense.grad)
    close(seen["gathered"], plain_inner.grad)
    close(inner.grad, plain_inner.grad)


@case
def a_hook_may_replace_the_gradient(mesh):
    w, x = data(6, 6), data(8, 6, seed=1)
    batch = sharded(x, mesh, Shard(0), Replicate(), grad=True)
    inner = batch.redistribute(mesh, [Replicate(), Replicate()])
    inner.register_hook(lambda g: g * 3)
    F.linear(inner, sharded(w, mesh, Replicate(), Shard(0))).sum().backward()
    plain = x.clone().requires_grad_()
    (F.linear(plain, w).sum() * 3).backward()
    close(batch.grad, plain.grad)


@case
def double_backward(mesh):
    w, x = data(6, 6), data(8, 6, seed=1)
    ours, dense = sharded(w, mesh, Replicate(), Shard(0), grad=True), w.clone().requires_grad_()
    batch, plain = sharded(x, mesh, Shard(0), Shard(1), grad=True), x.clone().requires_grad_()
    gathered = batch.redistribute(mesh, [Shard(0), Replicate()])
    (first,) = torch.autograd.grad(F.linear(gathered, ours).pow(3).sum(), batch, create_graph=True)
    (want,) = torch.autograd.grad(F.linear(plain, dense).pow(3).sum(), plain, create_graph=True)
    close(first, want)
    first.square().sum().backward()
    want.square().sum().backward()
    close(batch.grad, plain.grad)
    close(ours.grad, dense.grad)


def smooth(x, w, b):
    """Products, sums over split dims, a bias, an activation used twice, a scalar in between."""
    h = F.linear(x, w, b).sin()
    again = h * h.mean() + F.linear(h, w)
    return (again * b).pow(2).sum() + h.sum(0).pow(3).sum() + (w * w).sum() * x.mean()


def derivatives(function, inputs, order):
    """Sums of squares of first derivatives, nested `order` times; gradients of the last."""
    value = function(*inputs)
    for _ in range(order - 1):
        first = torch.autograd.grad(value, inputs, create_graph=True)
        value = sum(g.square().sum() for g in first)
    return torch.autograd.grad(value, inputs)


R, S0, S1 = Replicate(), Shard(0), Shard(1)
PLACED = [
    ((S0, R), (R, S0), (R, R)),
    ((S0, S1), (R, S0), (R, S0)),
    ((S0, S1), (R, S1), (R, R)),
    ((R, R), (S0, S1), (R, R)),
    ((R, S1), (R, R), (S0, R)),
    ((R, R), (R, R), (R, R)),
    ((S1, S0), (S1, S0), (S0, S0)),
]


@case
def second_and_third_derivatives(mesh):
    shapes = ((5, 6), (6, 6), (6,))
    values = [data(*shape, seed=i).double() / 2 for i, shape in enumerate(shapes)]
    for places in PLACED:
        for order in (1, 2, 3):
            ours = [sharded(v, mesh, *p, grad=True) for v, p in zip(values, places, strict=True)]
            # Also as activations, behind a redistribution where there is something to move.
            inner = [t * 1 for t in ours]
            dense = [v.clone().requires_grad_() for v in values]
            want = derivatives(smooth, dense, order)
            for inputs in (ours, inner):
                for mine, theirs in zip(derivatives(smooth, inputs, order), want, strict=True):
                    whole = mine.full_tensor()
                    torch.testing.assert_close(whole, theirs, rtol=1e-9, atol=1e-9)


@case
def checkpointing_draws_the_same_mask_again(mesh):
    w, x = data(6, 6), data(8, 6, seed=1)
    ours, dense = sharded(w, mesh, Replicate(), Shard(0), grad=True), w.clone().requires_grad_()
    batch, plain = sharded(x, mesh, Shard(0), Replicate(), grad=True), x.clone().requires_grad_()
    torch.manual_seed(5)
    block = lambda t, p: F.dropout(F.linear(t, p), 0.5).relu()  # noqa: E731
    checkpoint(block, batch * 1, ours, use_reentrant=False).sum().backward()
    ours_after = torch.get_rng_state()
    torch.manual_seed(5)
    checkpoint(block, plain * 1, dense, use_reentrant=False).sum().backward()
    assert torch.equal(ours_after, torch.get_rng_state())
    close(ours.grad, dense.grad)
    close(batch.grad, plain.grad)


@case
def an_optimizer_step_and_data_drop_old_faces(mesh):
    w, x = data(6, 6), data(8, 6, seed=1)
    ours, dense = sharded(w, mesh, Replicate(), Shard(0), grad=True), w.clone().requires_grad_()
    batch = sharded(x, mesh, Shard(0), Replicate())
    optimizers = [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in (ours, dense)]
    for _ in range(3):
        F.linear(batch, ours).square().sum().backward()
        F.linear(x, dense).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    close(ours, dense)
    ours.data = sharded(w * 2, mesh, Replicate(), Shard(0))
    dense.data = w * 2
    F.linear(batch, ours).square().sum().backward()
    F.linear(x, dense).square().sum().backward()
    close(ours.grad, dense.grad)


@case
def clipping_takes_the_total_at_every_step(mesh):
    """A call that is known by now must still notice that a gradient owes a sum."""
    w, x = data(6, 6), data(8, 6, seed=1)
    ours = [sharded(w, mesh, Replicate(), place, grad=True) for place in (Shard(0), Replicate())]
    dense = [w.clone().requires_grad_() for _ in ours]
    batch = sharded(x, mesh, Shard(0), Replicate())
    for kind in ("SGD", "AdamW"):
        makers = [getattr(torch.optim, kind)(ps, lr=0.1) for ps in (ours, dense)]
        for _ in range(4):
            norms = []
            for inputs, parameters, optimizer in zip(
                (batch, x), (ours, dense), makers, strict=True
            ):
                optimizer.zero_grad()
                F.linear(F.linear(inputs, parameters[0]), parameters[1]).square().sum().backward()
                norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
                optimizer.step()
            close(*norms)
    for mine, theirs in zip(ours, dense, strict=True):
        close(mine, theirs)


@case
def a_plain_leaf_among_dtensors_gets_the_complete_gradient(mesh):
    w, x = data(6), data(8, 6, seed=1)
    plain, dense = w.clone().requires_grad_(), w.clone().requires_grad_()
    (sharded(x, mesh, Shard(0), Shard(1)) * plain).square().sum().backward()
    (x * dense).square().sum().backward()
    close(plain.grad, dense.grad)


@case
def from_local_and_to_local_carry_gradients(mesh):
    x = data(8, 6)
    local = x.chunk(2)[mesh.get_local_rank("dp")].clone().requires_grad_()
    ours = vd.DTensor.from_local(local, mesh, [Shard(0), Replicate()])
    (ours * sharded(data(8, 6, seed=1), mesh, Shard(0), Shard(1))).to_local().sum().backward()
    want = data(8, 6, seed=1).chunk(2)[mesh.get_local_rank("dp")]
    close(local.grad, want)


@case
def a_bias_beside_a_row_parallel_product_is_added_once(mesh):
    w, b, x = data(6, 6), data(6, seed=2), data(8, 6, seed=1)
    weight, bias = (
        sharded(w, mesh, Replicate(), Shard(1), grad=True),
        sharded(b, mesh, Replicate(), Replicate(), grad=True),
    )
    dense_w, dense_b = w.clone().requires_grad_(), b.clone().requires_grad_()
    ours = F.linear(sharded(x, mesh, Shard(0), Shard(1)), weight, bias)
    assert ours.placements == (Shard(0), Partial())
    ours.square().sum().backward()
    F.linear(x, dense_w, dense_b).square().sum().backward()
    close(weight.grad, dense_w.grad)
    close(bias.grad, dense_b.grad)


@case
def a_custom_function_is_an_error_and_never_detaches(mesh):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    ours = sharded(data(8, 6), mesh, Shard(0), Replicate(), grad=True)
    with pytest.raises(UnsupportedError, match=r"autograd\.Function"):
        (Double.apply(ours) * 1).sum().backward()
    with pytest.raises(UnsupportedError, match=r"autograd\.Function"):
        Double.apply(ours * 1).to_local()
    with torch.no_grad():
        close(Double.apply(ours), data(8, 6) * 2)


@case
def a_function_that_returns_its_input_or_plain_tensors_is_an_error(mesh):
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, grad):
            return -grad

    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.to_local().sum()

        @staticmethod
        def backward(ctx, grad):
            return grad.expand(8, 6)

    ours = sharded(data(8, 6), mesh, Shard(0), Replicate(), grad=True)
    with pytest.raises(UnsupportedError, match=r"autograd\.Function"):
        Reversed.apply(ours * 1).sum()
    Local.apply(ours).backward()
    with pytest.raises(UnsupportedError, match="returned plain tensors"):
        _ = ours.grad


@torch.library.custom_op("vescale_test::twice", mutates_args=())
def twice(a: torch.Tensor) -> torch.Tensor:
    return a * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad * 2)


@case
def a_custom_op_takes_the_fallback_and_keeps_its_gradient(mesh):
    ours = sharded(data(8, 6), mesh, Shard(0), Shard(1), grad=True)
    (twice(ours) * ours).sum().backward()
    close(ours.grad, data(8, 6) * 4)


@case
def nothing_is_kept_alive_by_a_cycle(mesh):
    ours = sharded(data(6, 6), mesh, Replicate(), Shard(0), grad=True)
    gc.collect()
    gc.disable()
    try:
        hidden = sharded(data(8, 6, seed=1), mesh, Shard(0), Shard(1), grad=True) * 2
        whole = hidden.redistribute(mesh, [Shard(0), Replicate()])
        loss = F.linear(whole, ours).square().sum()
        loss.backward()
        watched = [weakref.ref(t) for t in (hidden, whole, loss, whole.to_local())]
        watched += [weakref.ref(t._local_tensor) for t in (hidden, whole, loss)]
        del hidden, whole, loss
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()


def run_case(rank, world, name):
    CASES[name](mesh22())


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    run(run_case, 4, name)
