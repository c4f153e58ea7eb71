"""Gradients are those of one device, complete where a user reads them, with the fewest collectives.

Every program runs on one device and on dp=2 x tp=2, and all that it returns is compared.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from named_cases import named_cases
from one_device import check, full_tensors
from vescale_comm import simulate, trace
from vescale_comm.testing import run
from vescale_dtensor import Partial, Replicate, Shard

PROGRAMS, program = named_cases()
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


W, X, H, ROW = data(6, 6), data(8, 6, seed=1), data(5, 6, seed=2), data(6)
WS = [data(6, 6, seed=i) for i in range(1, 4)]


def lies(place, tensor, *placements):
    """A tensor lies so, if it is distributed."""
    assert place.mesh is None or tensor.placements == placements


def one_all_reduce(place, work):
    """What some work returns, which sends one thing."""
    with trace() as traced:
        result = work()
    assert place.mesh is None or traced.counts() == {"all_reduce": 1}
    return result


@program
def a_parameter_used_both_ways_on_different_axes(place):
    w = place(W, R, R, grad=True)
    varying = F.linear(place(X, S0, R), w).square().sum()
    (varying + F.linear(place(H, R, S0), w).sum()).backward()
    lies(place, w.grad, P, P)
    return one_all_reduce(place, lambda: full_tensors(w.grad))


@program
def an_activation_used_both_ways_needs_one_collective(place):
    x = place(X, S0, R, grad=True)
    hidden = x * 2
    loss = sum(F.linear(hidden, place(w, R, S0)).square().sum() for w in WS)
    one_all_reduce(place, loss.backward)
    return x.grad


@program
def uses_on_tp_on_dp_and_on_both_need_one_collective(place):
    x = place(W, R, R, grad=True)
    hidden = x.sin()
    layouts = [(R, S1), (S1, R), (S0, S1)]
    # The last one splits the contracted dim over dp: the hidden tensor is sliced there.
    placed = [place(w, *layout) for w, layout in zip(WS, layouts, strict=True)]
    (sum((hidden @ w).square().sum() for w in placed) + hidden.sum()).backward()
    return x.grad


@program
def uses_that_vary_on_different_axes_share_one_collective(place):
    x = place(H, R, R, grad=True)
    once = (x * 1).sin()
    layouts = [(R, S1), (S1, R), (S1, S1)]
    placed = [place(w, *layout) for w, layout in zip(WS, layouts, strict=True)]
    loss = sum((once @ w).square().sum() for w in placed) + once.sum()
    one_all_reduce(place, loss.backward)
    return x.grad


@program
def an_alias_made_without_grad_is_not_reused_with_it(place):
    x, w = place(X, R, R, grad=True), place(W, R, S0)
    hidden = x * 1
    with torch.no_grad():
        F.linear(hidden, w)
    F.linear(hidden, w).sum().backward()
    return x.grad


@program
def inference_mode_then_training(place):
    w, x = place(W, R, S0, grad=True), place(X, S0, R)
    with torch.inference_mode():
        seen = full_tensors(F.linear(x, w))
    F.linear(x, w).sum().backward()
    return seen, w.grad


@program
def frozen_then_unfrozen(place):
    w, x = place(W, R, R, grad=True), place(X, S0, R)
    w.requires_grad_(False)
    assert not F.linear(x, w).requires_grad
    w.requires_grad_(True)
    F.linear(x, w).sum().backward()
    return w.grad


@program
def two_backwards_through_one_graph(place):
    w = place(W, R, S0, grad=True)
    loss = F.linear(place(X, S0, R), w).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return w.grad


@program
def reading_the_total_between_accumulations_changes_nothing(place):
    w, seen = place(W, R, R, grad=True), []
    for x in WS:
        F.linear(place(x, S0, R), w).square().sum().backward()
        total = w.grad if place.mesh is None else vd.gradient_total(w)
        seen.append(full_tensors(total).clone())
        lies(place, w.grad, R, R)
    assert w.grad is w.grad
    return seen


@program
def a_leaf_returned_as_it_is_stays_one_leaf(place):
    w, x, seen = place(W, R, R, grad=True), place(X, S0, R), []
    for _ in range(3):  # the first call, and calls that are known by then
        w.grad = None
        (F.linear(x, w.contiguous()).sum() + w.to("cpu").sum()).backward()
        seen.append(w.grad)
    return seen


@program
def a_gradient_set_by_hand_accumulates_rightly(place):
    w, x = place(W, R, S0, grad=True), place(X, S0, R)
    F.linear(x, w).sum().backward()
    w.grad = place(WS[2], R, S1)
    F.linear(x, w).sum().backward()
    return w.grad


@program
def an_invariant_use_after_a_varying_step(place):
    w = place(ROW, R, R, grad=True)
    (w * 3).sum().backward()
    lies(place, w.grad, R, R)
    (place(X, S0, R) * w).sum().backward()
    lies(place, w.grad, P, R)
    (w * 3).sum().backward()
    return w.grad


@program
def an_optimizer_step_and_data_drop_old_aliases(place):
    w, x = place(W, R, S0, grad=True), place(X, S0, R)
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    for _ in range(3):
        F.linear(x, w).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    stepped = full_tensors(w).clone()
    w.data = place(W * 2, R, S0)
    F.linear(x, w).square().sum().backward()
    return stepped, w.grad


@program
def clipping_takes_the_total_at_every_step(place):
    """A call that is known by now must still notice that a gradient owes a sum."""
    ws, x, norms = [place(W, R, tp, grad=True) for tp in (S0, R)], place(X, S0, R), []
    for kind in ("SGD", "AdamW"):
        optimizer = getattr(torch.optim, kind)(ws, lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            F.linear(F.linear(x, ws[0]), ws[1]).square().sum().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(ws, 1.0))
            optimizer.step()
    return norms, ws


@program
def a_plain_leaf_among_dtensors_gets_the_complete_gradient(place):
    plain = ROW.clone().requires_grad_()
    (place(X, S0, S1) * plain).square().sum().backward()
    return plain.grad


@program
def from_local_and_to_local_carry_gradients(place):
    if place.mesh is None:
        return []
    at, mesh = place.mesh.get_local_rank("dp"), place.mesh
    local = X.chunk(2)[at].clone().requires_grad_()
    ours = vd.DTensor.from_local(local, mesh, [S0, R])
    (ours * place(X, S0, S1)).to_local().sum().backward()
    torch.testing.assert_close(local.grad, X.chunk(2)[at])
    return []


@program
def a_bias_beside_a_row_parallel_product_is_added_once(place):
    w, b = place(W, R, S1, grad=True), place(ROW, R, R, grad=True)
    result = F.linear(place(X, S0, S1), w, b)
    lies(place, result, S0, P)
    result.square().sum().backward()
    return w.grad, b.grad


@program
def nothing_is_kept_alive_by_a_cycle(place):
    if place.mesh is None:
        return []
    w = place(W, R, S0, grad=True)
    gc.collect()
    gc.disable()
    try:
        hidden = place(X, S0, S1, grad=True) * 2
        whole = hidden.redistribute(placements=[S0, R])
        loss = F.linear(whole, w).square().sum()
        loss.backward()
        watched = [weakref.ref(t) for t in (hidden, whole, loss, whole.to_local())]
        watched += [weakref.ref(t._local_tensor) for t in (hidden, whole, loss)]
        del hidden, whole, loss
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()
    return []


def run_program(rank, world, name):
    check(PROGRAMS[name], rtol=2e-5, atol=2e-6)


IN_PROCESSES = ("nothing_is_kept_alive_by_a_cycle", "frozen_then_unfrozen")


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name):
    on_ranks = (lambda f, name: run(f, 4, name)) if name in IN_PROCESSES else simulate(4)
    on_ranks(run_program, name)
