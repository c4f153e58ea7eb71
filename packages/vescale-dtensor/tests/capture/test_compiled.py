"""Programs compile, and run under CUDA graphs: same results, same random numbers.

A compiler may round otherwise than eager, so values are compared with torch's own tolerances.
"""

import shutil
import warnings

import pytest
import torch
import vescale_dtensor as vd
from capture_semantics import Mlp
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
