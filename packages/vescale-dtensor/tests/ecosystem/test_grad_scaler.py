"""GradScaler over sharded gradients does what it does on one device, and the same on every rank.

Scales, skipped steps and parameters are compared over several steps, with infinities that only one
rank sees; ranks never disagree about a step, and no gradient is gathered to be looked at.
"""

import pytest
import torch
import vescale_dtensor as vd
from torch import nn
from vescale_comm import simulate, trace
from vescale_comm.testing import device_mesh, on_ranks, run
from vescale_dtensor import InterleavedShard, Partial, Replicate, Shard

MESHES = {(4,): ("tp",), (2, 2): ("dp", "tp")}
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=False),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "fused adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "fused sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "fused adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, fused=True),
}
STEPS, ROWS = 7, 7
INFINITE = {2: 6, 3: 0}  # at this step, in this row of the batch: another rank's each time


def network(mesh=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 5))
    if mesh is not None:
        for linear, dim in ((model[0], 0), (model[3], 1)):
            placements = [Replicate()] * (mesh.ndim - 1) + [Shard(dim)]
            weight = vd.distribute_tensor(linear.weight.detach(), mesh, placements)
            linear.weight = nn.Parameter(weight)
        vd.distribute_module(model, mesh)
    return model


def batch(step, mesh=None):
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step))
    if step in INFINITE:
        x[INFINITE[step], 3] = torch.inf
    if mesh is None:
        return x
    return vd.distribute_tensor(x, mesh, [Shard(0)] + [Replicate()] * (mesh.ndim - 1))


def full_tensor(x):
    return (x.full_tensor() if isinstance(x, vd.DTensor) else x).detach().clone()


def trained(kind, mesh=None, clip=False, amp=False, restart=None):
    """What can be seen of some steps: scales, norms, whether parameters moved, and where to."""
    model = network(mesh)
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    seen = []
    for step in range(STEPS):
        if step == restart:
            state, scaler = scaler.state_dict(), torch.amp.GradScaler("cpu")
            scaler.load_state_dict(state)
        before = full_tensor(model[0].weight)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = model(batch(step, mesh)).float().square().mean()
        scaler.scale(loss).backward()
        if clip and step != 5:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            seen.append(float(norm) if norm.isfinite() else "no norm")
        scaler.step(optimizer)
        # What a fused step leaves in gradients, too.
        gradient = full_tensor(model[3].weight.grad)
        seen.append(gradient if gradient.isfinite().all() else "not finite")
        scaler.update()
        optimizer.zero_grad()
        moved = not torch.equal(before, full_tensor(model[0].weight))
        seen.append((scaler.get_scale(), scaler._get_growth_tracker(), moved))
    return seen + [full_tensor(p) for p in model.parameters()]


def matches(found, wanted, rtol=1e-4, atol=1e-5):
    assert len(found) == len(wanted)
    for mine, one in zip(found, wanted, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(mine, one, rtol=rtol, atol=atol)
        elif isinstance(one, float):
            assert mine == pytest.approx(one, rel=rtol)
        else:
            assert mine == one


def on_a_rank(rank, world, kind, sizes, clip, restart=None):
    mesh = vd.init_device_mesh("cpu", sizes, mesh_dim_names=MESHES[sizes])
    return trained(kind, mesh, clip, restart=restart)


@pytest.mark.parametrize("clip", [False, True], ids=["alone", "clipped"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_is_that_of_one_device(kind, clip):
    wanted = trained(kind, clip=clip)
    moved = [entry[2] for entry in wanted if isinstance(entry, tuple)]
    assert moved == [step not in INFINITE for step in range(STEPS)]
    for sizes in MESHES:
        for found in simulate(4)(on_a_rank, kind, sizes, clip):
            matches(found, wanted)


@pytest.mark.parametrize("kind", ["adamw", "fused adamw"])
@on_ranks(4)
def test_training_in_processes_and_under_autocast(kind):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    matches(trained(kind, mesh, clip=True), trained(kind, clip=True))
    # bf16 rounds to 2^-9; the loss is of a few numbers, whose rounding differs by layout
    under = trained(kind, mesh, amp=True), trained(kind, amp=True)
    scales = [[entry for entry in seen if isinstance(entry, tuple)] for seen in under]
    assert scales[0] == scales[1]


def test_a_loaded_state_goes_on():
    wanted = trained("adamw")
    for found in simulate(4)(on_a_rank, "adamw", (2, 2), False, 4):
        matches(found, wanted)


def checked(gradients):
    """`found_inf` after torch's function looked at these."""
    found, factor = torch.zeros(()), torch.tensor(0.5)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, factor)
    return found.item()


PLACED = {
    (4,): [[Shard(0)], [Shard(1)], [InterleavedShard(1, 3)], [Replicate()], [Partial()]],
    (2, 2): [
        [Shard(0), Shard(1)],
        [Replicate(), Shard(0)],
        [Partial(), Shard(1)],
        [Shard(0), Partial()],
    ],
}


def placements_of_gradients(rank, world, sizes):
    mesh = vd.init_device_mesh("cpu", sizes)
    w = torch.arange(15.0).reshape(5, 3) + 1
    results = []
    for placements in PLACED[sizes]:
        for bad in (None, torch.inf, -torch.inf, torch.nan):
            for place in ((0, 0), (4, 2), (2, 1)):
                x = w.clone()
                if bad is not None:
                    x[place] = bad
                gradient = vd.distribute_tensor(x, mesh, placements)
                other = vd.distribute_tensor(w, mesh, [Replicate()] * len(sizes))
                plain = w.clone()
                results.append(checked([other, gradient, plain]) == (bad is not None))
                torch.testing.assert_close(full_tensor(gradient), x * 0.5, equal_nan=True)
                torch.testing.assert_close(full_tensor(other), w * 0.5)
                torch.testing.assert_close(plain, w * 0.5)
    return all(results)


@pytest.mark.parametrize("sizes", PLACED)
def test_every_rank_hears_of_what_one_sees(sizes):
    assert simulate(4)(placements_of_gradients, sizes) == [True] * 4


def sums_of_partials(rank, world):
    mesh = vd.init_device_mesh("cpu", (4,))
    results = []
    for terms in ([3e38] * 4, [torch.inf, -torch.inf, 0.0, 0.0], [3e38, -3e38, 1.0, 1.0]):
        p = nn.Parameter(vd.distribute_tensor(torch.ones(3), mesh, [Replicate()]))
        x = vd.DTensor.from_local(torch.tensor([terms[rank]]), mesh, [Shard(0)])
        (p[:1] * x).sum().backward()
        results.append((checked([p.grad]), full_tensor(p.grad).tolist()))
    return results


def test_the_sum_of_gradients_is_looked_at_and_not_its_terms():
    for overflow, cancelled, fine in simulate(4)(sums_of_partials):
        assert overflow == (1.0, [torch.inf, 0.0, 0.0])
        assert cancelled[0] == 1.0
        assert fine == (0.0, [1.0, 0.0, 0.0])


def two_meshes(rank, world):
    """One optimizer's gradients on a mesh and on the rank's part of it."""
    square = vd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = square["dp"]
    w, found = torch.ones(4, 4), []
    for guilty in range(4):
        for on_line in (True, False):
            small = vd.distribute_tensor(w, line, [Shard(0)], src_data_rank=None)
            large = vd.distribute_tensor(w, square, [Replicate(), Shard(1)], src_data_rank=None)
            if rank == guilty:
                (small if on_line else large).to_local()[0, 0] = torch.inf
            order = [small, large] if guilty % 2 else [large, small]
            found.append(checked(order))
    return found


def test_meshes_hear_of_each_other():
    assert simulate(4)(two_meshes) == [[1.0] * 8] * 4


def counted(rank, world):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    w = torch.ones(64, 64)
    cut = vd.distribute_tensor(w, mesh, [Replicate(), Shard(0)])
    same = vd.distribute_tensor(w, mesh, [Replicate(), Replicate()])
    with trace() as tracer:
        checked([cut, same])
    sent = [(record.bytes, len(record.ranks)) for record in tracer.records]
    with trace() as tracer:
        checked([same])
    return sent, len(tracer.records)


def test_nothing_is_gathered_to_be_looked_at():
    for sent, quiet in run(counted, 4):
        assert sent == [(4, 2)], "one number, over tp"
        assert quiet == 0


def half_gradients(rank, world):
    mesh = device_mesh((4,), ("tp",))
    weight = vd.distribute_tensor(torch.ones(6, 6).half(), mesh, [Shard(0)])
    p = nn.Parameter(weight)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler.scale(p.float().sum()).backward()
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(optimizer)
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.step(optimizer)
    off.update()
    return full_tensor(p).float().tolist()


def test_what_torch_refuses_is_refused():
    p = nn.Parameter(torch.ones(6, 6).half())
    torch.amp.GradScaler("cpu").scale(p.float().sum()).backward()
    torch.optim.SGD([p], lr=0.1).step()
    assert run(half_gradients, 4) == [p.detach().float().tolist()] * 4
