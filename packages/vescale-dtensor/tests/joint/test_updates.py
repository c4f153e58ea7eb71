"""A joint graph with the optimizer inside gives the bits of eager mode: six steps of a schedule.

Losses, norms, parameters, buffers, the state of optimizer and generator; clipped or not; on one
device, data parallel, and data and tensor parallel. What has no operators is refused with words.
"""

import copy
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import vescale_dtensor as vd
from joint_models import batch, built, locals_of, mesh_of
from torch import nn, optim
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import CaptureError, storage
from vescale_dtensor._joint.update import Update

STEPS = 6
OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "plain": lambda p: optim.SGD(p, 0.1, maximize=True),
    "nesterov": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: optim.Adam(p, 0.01, amsgrad=True, weight_decay=0.1, maximize=True),
    "adamw": lambda p: optim.AdamW(p, 0.01),
    "foreach": lambda p: optim.AdamW(p, 0.01, amsgrad=True, foreach=True),
    "fused": lambda p: optim.AdamW(p, 0.01, amsgrad=True, fused=True),
    "fused adam": lambda p: optim.Adam(p, 0.01, weight_decay=0.1, fused=True),
}


def state_of(optimizer):
    found = optimizer.state_dict()["state"]
    return [(key, name, found[key][name]) for key in found for name in found[key]]


def eager_step(model, optimizer, words, max_norm):
    optimizer.zero_grad()
    loss = model(words)
    loss.backward()
    norm = loss
    if max_norm is not None:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    # As clipping does, and vescale_parallel: unsummed, weight decay is added with other rounding.
    storage.reduce_gradients(model.parameters())
    optimizer.step()
    return loss, norm


def compared(rank, world_size, axes, kind, name, max_norm):
    mesh = mesh_of(axes, world_size)
    eager = built(kind, mesh)
    twin, words = copy.deepcopy(eager), batch(mesh, 0)
    first, second = (OPTIMIZERS[name](model.parameters()) for model in (eager, twin))
    cycles = {"cycle_momentum": name != "plain", "total_steps": STEPS + 1}
    schedulers = [optim.lr_scheduler.OneCycleLR(one, 0.05, **cycles) for one in (first, second)]
    whole = vd.joint(vd.capture(twin), words).with_optimizer(second, max_norm=max_norm)
    twin.load_state_dict(eager.state_dict())  # what the recorded calls changed
    clipped = 0
    for step in range(STEPS):
        words, found = batch(mesh, step), []
        torch.manual_seed(step)
        loss, norm = eager_step(eager, first, words, max_norm)
        found.append([loss, norm, torch.get_rng_state()])
        torch.manual_seed(step)
        loss, norm = (whole(words), None) if max_norm is None else whole(words)
        found.append([loss, loss if norm is None else norm, torch.get_rng_state()])
        clipped += max_norm is not None and norm.full_tensor().item() > max_norm
        for each, model in zip(found, (eager, twin), strict=True):
            each[:2] = [one.full_tensor() for one in each[:2]]
            each += locals_of(model.state_dict().values())
        assert all(map(torch.equal, *found)), step
        for one, two in zip(state_of(first), state_of(second), strict=True):
            assert one[:2] == two[:2]
            assert torch.equal(*locals_of([one[2], two[2]])), (step, one[:2])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a scheduler that sees no step
            for one in schedulers:
                one.step()
    assert all(p.grad is None for p in twin.parameters())
    assert bool(clipped) == (max_norm is not None)
    return len(whole.graph_module.graph.nodes)


@pytest.mark.parametrize(
    ("name", "max_norm"),
    [("sgd", 0.3), ("nesterov", None), ("adam", 0.3), ("foreach", None), ("fused", 0.3)],
)
def test_bits_of_eager_mode(name, max_norm):
    simulate(1).run(compared, "dp", "net", name, max_norm)


@pytest.mark.parametrize(("axes", "ranks"), [("dp", 2), ("dp tp", 4)])
def test_bits_of_eager_mode_on_meshes(axes, ranks):
    simulate(ranks).run(compared, axes, "llama", "adamw", 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_all_of_them_on_meshes(name, max_norm):
    simulate(2).run(compared, "dp", "net", name, max_norm)
    simulate(4).run(compared, "dp tp", "llama", name, max_norm)


def layer(mesh):
    torch.manual_seed(0)
    model = vd.distribute_module(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), mesh)
    x = vd.distribute_tensor(torch.ones(4, 4), mesh, [vd.Shard(0)], src_data_rank=None)
    return model, x, vd.joint(vd.capture(lambda x: model(x).square().mean()), x)


def refused(words, call, *args, **kwargs):
    with pytest.raises(CaptureError, match=words):
        call(*args, **kwargs)


def refusals(rank, world_size):
    model, x, whole = layer(device_mesh((world_size,), ("dp",)))
    of = list(model.parameters())
    refused("RMSprop", whole.with_optimizer, optim.RMSprop(of))
    refused("fused=True", whole.with_optimizer, optim.SGD(of, fused=True))
    refused("capturable", whole.with_optimizer, optim.Adam(of, capturable=True))
    refused("'lr' of AdamW is a tensor", whole.with_optimizer, optim.AdamW(of, torch.tensor(0.1)))
    refused("no parameter", whole.with_optimizer, optim.SGD([torch.zeros(2)]))
    hooked = optim.SGD(of)
    hooked.register_step_post_hook(lambda *_: None)
    refused("hooks", whole.with_optimizer, hooked)
    sgd = optim.SGD(of, 0.1, momentum=0.5)
    step = whole.with_optimizer(sgd)
    refused("comes first", step.with_optimizer, sgd)
    for fused in (False, True):
        adam = optim.Adam(of, fused=fused)
        whole.with_optimizer(adam)(x)
        adam.param_groups[0]["amsgrad"] = True  # eager mode raises, too: what was kept stays
        refused("has no 'max_exp_avg_sq'", whole.with_optimizer, adam)
        assert all(int(one["step"]) == 1 and one["exp_avg"].any() for one in adam.state.values())
    step(x)
    sgd.param_groups[0]["weight_decay"] = 0.1  # from none
    refused("have changed", step, x)
    sgd.param_groups[0]["weight_decay"] = 0
    sgd.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    refused("have changed", step, x)
    return True


def some(rank, world_size):
    """What the optimizer does not step gets its gradient; what it alone has must have none."""
    model, x, whole = layer(device_mesh((world_size,), ("dp",)))
    other = torch.zeros(2, requires_grad=True)
    adam = optim.AdamW([{"params": [model[1].weight]}, {"params": [other], "lr": 1.0}], 0.1)
    step, before = whole.with_optimizer(adam), model[1].weight.full_tensor().clone()
    step(x)
    assert model[0].weight.grad is not None
    assert model[1].weight.grad is None
    assert not torch.equal(model[1].weight.full_tensor(), before)
    refused("has a gradient already", step, x)
    model.zero_grad()
    other.grad = torch.ones(2)
    refused("has a gradient already", step, x)
    other.grad = None
    adam.state[model[1].weight]["step"] += 3  # read anew at each call
    step(x)
    assert adam.state[model[1].weight]["step"] == 5
    return True


def changed(rank, world_size):
    """What changes after the graph was made is seen: loaded state, hooks; settings are compared."""
    mesh = device_mesh((world_size,), ("dp",))
    (model, x, whole), (twin, _, _) = layer(mesh), layer(mesh)
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    sgd, eager = (optim.SGD(one.parameters(), **options) for one in (model, twin))

    def eager_step_of_twin():
        eager.zero_grad()
        twin(x).square().mean().backward()
        eager.step()

    eager_step_of_twin()
    model.load_state_dict(twin.state_dict())
    loaded = eager.state_dict()
    loaded["state"] = {at: {k: v.clone() for k, v in one.items()}
                       for at, one in loaded["state"].items()}  # fmt: skip
    # Its first step would be another one, of which nobody else would know.
    refused("first step of SGD with dampening", whole.with_optimizer, sgd)
    sgd.load_state_dict(loaded)
    step = whole.with_optimizer(sgd)
    sgd.load_state_dict({**loaded, "state": {at: {k: v.clone() for k, v in one.items()}
                                             for at, one in loaded["state"].items()}})  # fmt: skip
    # Threads of several ranks would put back each other's patches.
    alone = patch("vescale_dtensor._joint.update.note_settings")
    with alone if world_size == 1 else nullcontext() as noted:
        step(x)
    assert noted is None or noted.call_args.args[0] is sgd
    eager_step_of_twin()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(p.full_tensor(), q.full_tensor()) for p, q in pairs)
    hook = model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    refused("gradient hooks", step, x)
    hook.remove()
    step(x)
    return True


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_changes_is_seen(ranks):
    assert all(simulate(ranks).run(changed))


@pytest.mark.parametrize("ranks", [1, 2])
def test_refusals(ranks):
    assert all(simulate(ranks).run(refusals))
    assert all(simulate(ranks).run(some))


class OnDevice(torch.Tensor):
    """A number that the host would have to wait for."""

    is_cpu = False

    def item(self):
        raise AssertionError("read by itself")


def test_counts_of_a_fused_optimizer_are_read_by_one_copy():
    leaves = [object() for _ in range(3)]
    counts = [{"step": torch.tensor(float(at)).as_subclass(OnDevice)} for at in range(3)]
    update = Update.__new__(Update)
    update.rule = SimpleNamespace(counts=True)
    update.stepped = [SimpleNamespace(leaf=leaf) for leaf in leaves]
    update.optimizer = SimpleNamespace(state=dict(zip(leaves, counts, strict=True)))
    assert [update._counted()(leaf) for leaf in leaves] == [0.0, 1.0, 2.0]


class Rotated(nn.Module):
    """A complex weight, whose moments torch takes of its parts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs().square().mean()


def complex_steps(rank, world_size, name):
    mesh = device_mesh((world_size,), ("dp",))
    torch.manual_seed(0)
    plain = Rotated()
    twin, x = copy.deepcopy(plain), torch.randn(2, 4)
    vd.distribute_module(twin, mesh)
    first, second = (OPTIMIZERS[name](one.parameters()) for one in (plain, twin))
    there = vd.distribute_tensor(x, mesh, [vd.Replicate()])
    step = vd.joint(vd.capture(twin), there).with_optimizer(second)
    for _ in range(3):
        first.zero_grad()
        plain(x).backward()
        first.step()
        step(there)
        assert torch.equal(twin.weight.full_tensor(), plain.weight)
    return True


@pytest.mark.parametrize("name", ["nesterov", "adam", "foreach"])
def test_complex_parameters(name):
    assert all(simulate(1).run(complex_steps, name))


def under_autocast(rank, world_size):
    """A float32 island inside of a step that runs under autocast: nothing is cast again."""
    mesh = device_mesh((world_size,), ("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    vd.distribute_module(model, mesh)
    twin = copy.deepcopy(model)
    x = vd.distribute_tensor(torch.randn(4, 8), mesh, [vd.Replicate()])

    def step_of(one):
        def step(x):
            y = one[0](x)
            with torch.autocast("cpu", enabled=False):
                y = one[1](y.float())
            return y.square().mean()

        return step

    with torch.autocast("cpu", torch.bfloat16):
        whole = vd.joint(vd.capture(step_of(twin)), x)
        expected = step_of(model)(x)
        expected.backward()
        found = whole(x)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(found.full_tensor(), expected.full_tensor())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad.full_tensor(), q.grad.full_tensor())
    return True


def test_autocast():
    assert all(simulate(1).run(under_autocast))
