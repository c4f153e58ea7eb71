"""Ranks that diverge are told, on every rank: what differs, who and where.

Each case is a script of its own processes that trains some good steps; then one rank does something
else. The rank that drifts raises before anything is mixed up, and names itself; with it gone, the
others raise, too. `test_drift_silent.py` has the programs that must not raise.
"""

import atexit
import multiprocessing
import os
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from vescale_dtensor import DTensor, Replicate, Shard, capture, distribute_tensor

SIZE, GOOD, WHO = 3, 3, 1
# Steps, of programs that end when the comparison beside them finds what is not new.
MANY = 10_000
# Seconds between steps in which no rank waits for others: what differs is named only while it is
# remembered, and ranks on a busy machine would run far ahead of the comparison.
SLOW = 0.03


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.drop = nn.Dropout(0.5)
        self.skip = False

    def forward(self, x):
        x = torch.relu(self.up(x))
        if not self.skip:
            x = x * 2
        return self.down(self.drop(x))


def distributed(mesh, placement=None):
    torch.manual_seed(0)
    model = Net()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            made = distribute_tensor(parameter.detach(), mesh, [placement or Replicate()])
            module.register_parameter(name, nn.Parameter(made))
    return model


def train(rank, drift, steps=12, placement=None):
    """`drift(step, model, x)` changes what happens in a step, from step GOOD on, on one rank."""
    mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp",))
    model = distributed(mesh, placement)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        local = torch.ones(6, 4)
        if rank == WHO and step >= GOOD:
            local = drift(step, model, local)
        x = distribute_tensor(local, mesh, [Shard(0)], src_data_rank=None)
        loss = model(x).square().mean()  # the line of the forward
        optimizer.zero_grad()
        loss.backward()
        if not getattr(model, "no_step", False):
            optimizer.step()


def once(act):
    """In one step only."""

    def drift(step, model, x):
        if step == GOOD:
            act(model)
        return x

    return drift


def flagged(name):
    """An attribute of the model is true in one step."""

    def drift(step, model, x):
        setattr(model, name, step == GOOD)
        return x

    return drift


def bias_twice(model):
    with torch.no_grad():
        model.down.bias.mul_(0.9).mul_(0.9)


SILENT_WRITES = {
    "keeps_gradients": flagged("keep"),
    "writes_data": once(lambda m: m.down.bias.data.clamp_(-0.1, 0.1)),
    "writes_detached": once(lambda m: m.down.bias.detach().mul_(0.9)),
    "clips_values": once(lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-4)),
    "assigns_data": once(lambda m: setattr(m.down.bias, "data", m.down.bias.data * 0.9)),
    "assigns_a_gradient": once(lambda m: setattr(m.down.bias, "grad", m.down.bias.grad * 0.5)),
    "writes_data_of_a_gradient": once(lambda m: m.down.bias.grad.data.zero_()),
    "writes_twice": once(bias_twice),
}
CASES = {
    "another_shape": lambda step, model, x: torch.ones(9, 4),
    "evaluates": lambda step, model, x: (model.eval(), x)[1],
    "draws": once(lambda model: torch.rand(1)),
    "skips_an_op": flagged("skip"),
    "skips_an_update": flagged("no_step"),
    "lowers_its_rate": once(lambda m: m.optimizer.param_groups[0].update(lr=0.05)),
    **SILENT_WRITES,
}


def run_train(rank, name):
    train(rank, CASES[name])


def run_refused(rank, name):
    """Each step is captured, and refused: it reads its loss, and its bias is written inside."""
    mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp",))
    model = distributed(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def training_step(x):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if loss.item() > -1 and not getattr(model, "no_step", False):
            optimizer.step()
        return loss.detach()

    captured = capture(training_step, refused="run")
    for step in range(12):
        local = torch.ones(6, 4)
        if rank == WHO and step >= GOOD:
            local = CASES[name](step, model, local)
        captured(distribute_tensor(local, mesh, [Shard(0)], src_data_rank=None))


def run_train_without_reductions(rank, name):
    """Every rank has the whole batch, so that gradients are complete and nothing is sent."""
    mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("tp",))
    model = distributed(mesh)
    model.drop.p = 0.0
    model.optimizer = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(MANY):
        time.sleep(SLOW)
        x = DTensor.from_local(torch.ones(6, 4), mesh, [Replicate()])
        if rank == WHO and step >= GOOD:
            CASES[name](step, model, x)
        loss = model(x).square().mean()
        if not getattr(model, "keep", False):
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def run_seeds(rank, _):
    mesh = init_device_mesh("cpu", (SIZE,))
    torch.manual_seed(rank)
    F.dropout(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]), 0.5)


def run_values(rank, _):
    """Each rank has a batch of its own, which counts as replicated."""
    mesh = init_device_mesh("cpu", (SIZE,))
    weight = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
    for step in range(40):
        batch = torch.full((2, 4), float(step))
        if rank == WHO and step >= GOOD:
            batch = batch + 0.01
        torch.mm(batch, weight).sum().item()


def run_batches(rank, _):
    """The whole batch on every rank, of which each takes its rows."""
    mesh = init_device_mesh("cpu", (SIZE,))
    for step in range(40):
        batch = torch.full((6, 4), float(step))
        if rank == WHO and step >= GOOD:
            batch = batch.flip(0) + 0.01
        whole = DTensor.from_local(batch, mesh, [Replicate()], run_check="sampled")
        whole.redistribute(placements=[Shard(0)]).sum().item()


def run_norms(rank, instance):
    """Channels are sharded, and both modes have been met before, so that neither sends anything."""
    mesh = init_device_mesh("cpu", (SIZE,))
    norm = nn.InstanceNorm1d(6, track_running_stats=True) if instance else nn.BatchNorm1d(6)
    norm.register_parameter("weight", None)
    norm.register_parameter("bias", None)
    for name in ("running_mean", "running_var"):
        setattr(norm, name, distribute_tensor(getattr(norm, name), mesh, [Shard(0)]))
    x = distribute_tensor(torch.arange(96.0).reshape(4, 6, 4), mesh, [Shard(1)])
    for step in range(MANY):
        time.sleep(SLOW)
        norm.train(step % 2 == 0 and not (rank == WHO and step >= 2 * GOOD))
        norm(x).square().sum().item()


def run_no_gradients(rank, _):
    mesh = init_device_mesh("cpu", (SIZE,))
    x = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    for step in range(12):
        y = x + 1
        if not (rank == WHO and step == GOOD):
            y = y.neg()
        (y * y).sum().item()


def run_dropout(rank, _):
    """Another probability moves the generator as far, and communicates nothing else."""
    mesh = init_device_mesh("cpu", (SIZE,))
    x = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    for step in range(MANY):
        time.sleep(SLOW)
        p = 0.25 if rank == WHO and step >= GOOD else 0.5
        F.dropout(x, p).sum().item()


def scales_its_loss(x, w, k):
    (x.mm(w).sum() * k).backward()


def scales_its_gradient(x, w, k):
    x.mm(w).sum().backward()
    w.grad.mul_(k)


def clips_to_its_norm(x, w, k):
    x.mm(w).sum().backward()
    nn.utils.clip_grad_norm_([w], k)


def steps_at_its_rate(x, w, k):
    x.mm(w).sum().backward()
    with torch.no_grad():
        w.sub_(w.grad * (0.01 * k))


NUMBERS = {
    each.__name__: each
    for each in (scales_its_loss, scales_its_gradient, clips_to_its_norm, steps_at_its_rate)
}


def run_numbers(rank, name):
    """A number is another one on one rank; the calls, the shapes and the draws are the same."""
    mesh = init_device_mesh("cpu", (SIZE,))
    x = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    w = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    for step in range(MANY):
        time.sleep(SLOW)
        NUMBERS[name](x, w, 2.0 if rank == WHO and step >= GOOD else 1.0)
        (w.grad * 1).sum().item()
        w.grad = None


# What one rank does alone, and what is said of it.
ALONE = {
    "compares_a_plain_operand": (
        lambda x: (x * torch.ones(4)).neg(),
        "compares operand 1 of Tensor.mul, at ",
    ),
    "wraps_its_part": (
        lambda x: DTensor.from_local(torch.ones(2, 4), x.device_mesh, [Shard(0)]),
        "compares what ranks pass to from_local, at ",
    ),
    "distributes_a_tensor": (
        lambda x: distribute_tensor(torch.ones(6, 4), x.device_mesh, [Replicate()]),
        "distributes f32 ",
    ),
}


def run_alone(rank, name):
    """One rank makes a call, in the midst of the program, whose checks are collectives."""
    mesh = init_device_mesh("cpu", (SIZE,))
    x = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    for step in range(12):
        x = x + 1
        if rank == WHO and step == GOOD:
            ALONE[name][0](x)
        x.sum().item()


CHECKED = {
    "from_local": lambda mesh: DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]),
    "distribute_tensor": lambda mesh: distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]),
}


def run_raises(rank, name):
    """One rank raises, and the others wait for it in a check that is a collective."""
    mesh = init_device_mesh("cpu", (SIZE,))
    for step in range(12):
        if rank == WHO and step == GOOD:
            raise ValueError("a fault of the user's")
        CHECKED[name](mesh)


def program(run, name, rank, port, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    where = f"tcp://127.0.0.1:{port}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=SIZE)
    try:
        run(rank, name)
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        sys.last_value = error
    with open(f"{folder}/{rank}", "w") as file:
        file.write(said)
    # As a script that raised: it says why, and its sockets close.
    atexit._run_exitfuncs()
    os._exit(0)


def said_by_all(folder, run, name=""):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vescale_comm.testing", "vescale_dtensor"])
    ranks = [
        context.Process(target=program, args=(run, name, rank, port, str(folder)), daemon=True)
        for rank in range(SIZE)
    ]
    try:
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(60)
        assert not any(each.is_alive() for each in ranks)
    finally:
        for each in ranks:
            each.kill()
    return [(folder / str(rank)).read_text() for rank in range(SIZE)]


def check(said, *words):
    for text in said:
        assert "the ranks have diverged (ranks 0-2" in text, said
        (line,) = {line for line in text.split("\n") if line.startswith(f"  rank {WHO}: ")}
        for word in (f"{__file__}:", *words):
            assert word in line, said


WORDS = {
    "another_shape": "f32[9, 4] → [Shard(0)], at ",
    "evaluates": "backward from f32[], +dp, at ",
    "draws": "draws random numbers with a generator in state ",
    "skips_an_op": "made by relu → f32[6@dp, 6]",
    "skips_an_update": "f32[6, 4] → [Shard(0)], at ",
}


@pytest.mark.parametrize("name", list(WORDS))
def test_a_rank_that_trains_otherwise_is_named(tmp_path, name):
    check(said_by_all(tmp_path, run_train, name), WORDS[name])


@pytest.mark.parametrize("name", ["skips_an_op", "skips_an_update", "writes_data"])
def test_a_step_that_every_rank_refuses_to_record_is_compared_as_any_other(tmp_path, name):
    check(said_by_all(tmp_path, run_refused, name))


@pytest.mark.parametrize("name", list(ALONE))
def test_a_check_that_one_rank_comes_to_alone_is_named(tmp_path, name):
    check(said_by_all(tmp_path, run_alone, name), ALONE[name][1])


@pytest.mark.parametrize("name", list(CHECKED))
def test_who_waits_in_a_check_hears_of_the_rank_that_raised(tmp_path, name):
    for rank, text in enumerate(said_by_all(tmp_path, run_raises, name)):
        if rank != WHO:
            assert text.startswith("RankFailedError: "), text
            assert f"rank {WHO}: raised ValueError: a fault of the user's, at {__file__}:" in text


def test_a_skipped_call_shows_without_gradients(tmp_path):
    # Whether the number that was added is told, too, depends on how much the log has seen before.
    words = "→ f32[6@axis0, 4], mul → f32[6@axis0, 4]"
    check(said_by_all(tmp_path, run_no_gradients), words)


def test_a_batch_that_is_another_one_on_one_rank_shows_where_its_product_is_summed(tmp_path):
    check(said_by_all(tmp_path, run_values), "made of other data")


@pytest.mark.parametrize("name", list(SILENT_WRITES))
def test_what_one_rank_writes_where_nothing_is_sent_shows_in_the_next_backward(tmp_path, name):
    check(said_by_all(tmp_path, run_train_without_reductions, name), "backward from f32[], at ")


def test_settings_of_an_optimizer_that_are_others_on_one_rank_show(tmp_path):
    said = said_by_all(tmp_path, run_train_without_reductions, "lowers_its_rate")
    check(said, "made by SGD.step with lr=0.05")


def test_a_probability_that_is_another_one_on_one_rank_shows(tmp_path):
    check(said_by_all(tmp_path, run_dropout), "made by dropout with p=0.25")


@pytest.mark.parametrize("name", list(NUMBERS))
def test_a_number_that_is_another_one_on_one_rank_shows(tmp_path, name):
    check(said_by_all(tmp_path, run_numbers, name))


def test_a_whole_batch_that_is_another_one_on_one_rank_shows_at_its_first_sum(tmp_path):
    check(said_by_all(tmp_path, run_batches), "made of other data")


@pytest.mark.parametrize("instance", [False, True], ids=["batch_norm", "instance_norm"])
def test_a_norm_that_evaluates_on_one_rank_shows(tmp_path, instance):
    check(said_by_all(tmp_path, run_norms, instance), "f32[], +axis0")


def test_seeds_that_differ_show_at_the_first_draw(tmp_path):
    said = said_by_all(tmp_path, run_seeds)
    for text in said:
        assert "CommMismatchError: the ranks have diverged" in text
        for rank in range(SIZE):
            assert f"  rank {rank}: draws random numbers with a generator in state" in text
        assert f"{__file__}:" in text
