"""Regions between collectives are compiled, or run as they are on every rank: the same training.

Masks of dropout and collectives stay those of the graph; numbers equal eager mode's up to rounding,
and bit for bit where nothing is compiled.
"""

import copy
import shutil

import pytest
import torch
from graph_models import Net, batch
from torch import nn, optim
from vescale_comm import simulate
from vescale_comm.testing import on_ranks, run
from vescale_parallel import DisagreementError, GraphError, Plan, graph, mesh, parallelize
from vescale_parallel._graph.collectives import collectives

STEPS = 3


def built(zero):
    torch.manual_seed(0)
    plan = Plan(batch="dp:0", zero=zero)
    model = parallelize(Net(1), mesh(dp=torch.distributed.get_world_size()), plan)
    return model, optim.AdamW(model.parameters(), 0.02)


def refusing(rank):
    """A backend that fails on one rank, for the first region that it is asked about."""
    asked = []

    def backend(module, inputs):
        asked.append(module)
        if rank == 1 and len(asked) == 1:
            raise ValueError("no kernels today\nand more of it")
        return module

    return backend


def trained(rank, world_size, zero, backend):
    """Train beside eager mode; the regions of this rank."""
    (model, adam), (eager, other) = built(zero), built(zero)
    step = graph.train_step(model, model, batch(0)).with_optimizer(adam, max_norm=0.5)
    planned = graph.schedule(step.graph_module)
    found = graph.compile_regions(
        planned.graph_module, backend=refusing(rank) if backend is None else backend
    )
    before = [one.start.target for one in collectives(planned.graph_module.graph)]
    step = step.running(found.graph_module)
    exact = backend is None
    for at in range(STEPS):
        torch.manual_seed(at)
        loss, norm = step(batch(at))
        state = torch.get_rng_state()
        torch.manual_seed(at)
        other.zero_grad()
        expected = eager(batch(at))
        expected.backward()
        expected_norm = nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        other.step()
        assert torch.equal(state, torch.get_rng_state())
        pairs = [(loss, expected), (norm, expected_norm)]
        pairs += [
            (one, two) for one, two in zip(model.parameters(), eager.parameters(), strict=True)
        ]
        for one, two in pairs:
            one, two = (
                getattr(each, "full_tensor", lambda each=each: each)() for each in (one, two)
            )
            assert torch.equal(one, two) if exact else torch.allclose(one, two, 1e-4, 1e-6), at
    assert before  # something is sent
    return found.regions, str(found)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_region_that_one_rank_cannot_compile_runs_as_it_is_on_all(zero):
    (one, text), (two, _) = run(trained, 2, zero, None)
    assert one == two
    bad = [region for region in one if "no kernels today" in region.why_not]
    assert len(bad) == 1
    assert bad[0].why_not.startswith("rank 1: ")
    done = sum(not region.why_not for region in one)
    assert done >= 2
    assert f"{done} of {len(one)} regions compiled" in text
    assert any("blocks.0" in name for region in one for name in region.modules)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_traced_ahead_of_time(zero):
    one, two = run(trained, 2, zero, "aot_eager", timeout=250)
    assert one == two
    assert not any(region.why_not for region in one[0] if region.operations > 1)


@on_ranks(2, simulated=True)
def test_what_ranks_ask_otherwise_is_told_on_all(rank, world_size):
    model, _ = built(2)
    module = graph.train_step(model, model, batch(0)).graph_module
    with pytest.raises(GraphError, match=r"rank 0: .*no backend 'none such'"):
        graph.compile_regions(module, backend="none such")
    many = 10**6
    with pytest.raises(DisagreementError, match=f"operations': {many} on rank 0; 7 on rank 1"):
        graph.compile_regions(module, backend="eager", least_operations=7 if rank else many)
    found = graph.compile_regions(module, least_operations=many)
    assert {one.why_not.removeprefix("rank 0: ") for one in found.regions} == {"few operations"}


@pytest.mark.slow
@pytest.mark.timeout(900)  # nine regions, by a C++ compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler: no g++")
def test_inductor():
    one, two = run(trained, 2, 3, "inductor", timeout=880)
    assert one == two
    assert not any(region.why_not for region in one[0] if region.operations > 1)


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: optim.Adam(p, 0.02, amsgrad=True, weight_decay=0.01),
    "adamw": lambda p: optim.AdamW(p, 0.02),
    "fused": lambda p: optim.AdamW(p, 0.02, fused=True),
}


class Scaled(nn.Module):
    """Has a parameter without dims, as CLIP has, and one without elements."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return (self.layer(x) * self.scale).square().mean() + self.none.sum()


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(1, simulated=True)
def test_parameters_without_dims(name):
    torch.manual_seed(0)
    eager = parallelize(Scaled(), mesh(dp=1), Plan())
    model = copy.deepcopy(eager)
    first, second = (OPTIMIZERS[name](one.parameters()) for one in (model, eager))
    step = graph.train_step(model, model, torch.ones(2, 4)).with_optimizer(first)
    found = graph.compile_regions(step.graph_module, backend="eager")
    assert not any(one.why_not for one in found.regions if one.operations > 1)
    step = step.running(found.graph_module)
    for at in range(6):
        x = torch.full((2, 4), float(at))
        step(x)
        second.zero_grad()
        eager(x).backward()
        second.step()
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        one, other = one.full_tensor(), other.full_tensor()
        assert one.dtype == other.dtype
        # What has `alpha=` rounds otherwise.
        assert (
            torch.equal(one, other) if name == "adamw" else torch.allclose(one, other, 1e-4, 1e-6)
        )


def scheduled_steps(rank, world_size, name):
    """Twenty steps of a schedule beside eager mode; how often a region was compiled by then."""
    calls = []

    def backend(module, inputs):
        calls.append(module)
        return module

    (model, _), (eager, _) = built(1), built(1)
    first, second = (OPTIMIZERS[name](one.parameters()) for one in (model, eager))
    schedules = [optim.lr_scheduler.CosineAnnealingLR(one, 20) for one in (first, second)]
    step = graph.train_step(model, model, batch(0)).with_optimizer(first)
    found = graph.compile_regions(step.graph_module, backend=backend)
    assert not any(one.why_not for one in found.regions if one.operations > 1)
    # From before the first step on: compiled at once.
    step, counts = step.running(found.graph_module), [len(calls)]
    for at in range(20):
        torch.manual_seed(at)
        step(batch(at))
        torch.manual_seed(at)
        second.zero_grad()
        eager(batch(at)).backward()
        second.step()
        for one in schedules:
            one.step()
        counts.append(len(calls))
    for one, two in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(one.full_tensor(), two.full_tensor(), 1e-4, 1e-6)
    return counts


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_that_change_compile_nothing_anew(name):
    # On two ranks, each of which compiles for itself; one name is enough for that.
    for counts in simulate(2 if name == "adam" else 1).run(scheduled_steps, name):
        assert len(set(counts)) == 1
