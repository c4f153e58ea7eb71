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
from gradient_data import close, data, mesh22, sharded
from named_cases import named_cases
from vescale_comm import trace
from vescale_comm.testing import run
from vescale_dtensor import Partial, Replicate, Shard

CASES, case = named_cases()


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
def an_activation_used_both_ways_needs_one_collective(mesh):
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
def uses_on_tp_on_dp_and_on_both_need_one_collective(mesh):
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
def an_alias_made_without_grad_is_not_reused_with_it(mesh):
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
def an_optimizer_step_and_data_drop_old_aliases(mesh):
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
