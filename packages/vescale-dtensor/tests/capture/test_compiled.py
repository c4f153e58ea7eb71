"""Programs compile, and run under CUDA graphs: same results, same random numbers.

A compiler may round otherwise than eager, so values are compared with torch's own tolerances.
"""

import shutil
import warnings

import pytest
import torch
import vescale_dtensor as vd
from capture_semantics import Mlp
from torch import nn
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import Replicate, Shard


def compiles(rank, world_size, backend):
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # the compiler's own imports warn of its own parts
        compiled_as_eager(world_size, backend)


def compiled_as_eager(world_size, backend):
    sizes = (2, 2) if world_size == 4 else (1, 1)
    mesh = device_mesh(sizes, ("dp", "tp"))
    model, twin = Mlp(mesh), Mlp(mesh)
    compiled = vd.capture(model, transform=lambda module: torch.compile(module, backend=backend))
    for step in range(3):
        rows = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        x = vd.distribute_tensor(rows, mesh, [Shard(0), Replicate()], src_data_rank=None)
        results = []
        for forward, module in ((compiled, model), (twin, twin)):
            module.zero_grad()
            torch.manual_seed(step)
            loss = forward(x).square().sum()
            loss.backward()
            gradients = [p.grad.full_tensor() for p in module.parameters()]
            results.append((loss.detach().full_tensor(), gradients, torch.get_rng_state()))
        ours, theirs = results
        torch.testing.assert_close(ours[:2], theirs[:2])
        assert torch.equal(ours[2], theirs[2])
    assert len(compiled.programs) == 1


@pytest.mark.parametrize("world_size", [1, 4])
def test_compiles_by_aot_eager(world_size):
    run(compiles, world_size, "aot_eager", timeout=240)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler: no g++")
def test_compiles_by_inductor():
    run(compiles, 1, "inductor", timeout=280)


def graphed(rank, world_size):
    torch.cuda.set_device(0)  # or torch warns that it chooses one
    mesh = vd.init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).cuda()
    model = vd.distribute_module(layers, mesh)
    captured = vd.capture(lambda x: model(x).square().mean())
    rows = torch.randn(4, 8, device="cuda")
    x = vd.DTensor.from_local(rows, mesh, [Shard(0)])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad()
            captured(x).backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = captured(x)
        loss.backward()
    for seed in range(3):
        torch.manual_seed(seed)
        rows.copy_(torch.randn(4, 8))
        graph.replay()
        found = [loss.item(), *(p.grad.to_local().clone() for p in model.parameters())]
        kept = [p.grad for p in model.parameters()]
        model.zero_grad()
        expected = model(x).square().mean()
        expected.backward()
        wanted = [expected.item(), *(p.grad.to_local() for p in model.parameters())]
        torch.testing.assert_close(found, wanted)
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_runs_under_a_cuda_graph():
    run(graphed, 1)
