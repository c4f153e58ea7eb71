"""`torch.compile` does not look into what makes, converts and redistributes DTensors.

Compiled functions give eager mode's values and gradients, and the compiler says nothing; what it is
given to compile are operations on plain tensors alone. Outside of it, torch._dynamo stays out.
"""

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import vescale_dtensor as vd
from torch import Tensor, fx
from vescale_comm.testing import run
from vescale_dtensor import DeviceMesh, DTensor, Replicate, Shard, untraced

Case = Callable[[DTensor, DeviceMesh], Any]
CASES: dict[str, Case] = {
    "redistribute": lambda x, mesh: (x.redistribute(mesh, [Replicate()]) * 2).sum(),
    "redistribute, no-op": lambda x, mesh: x.redistribute(mesh, [Shard(0)]).exp(),
    "full_tensor": lambda x, mesh: x.full_tensor().cos().sum(),
    "from_local": lambda x, mesh: DTensor.from_local(x.to_local() * 2, mesh, [Shard(0)]),
    "distribute_tensor": lambda x, mesh: (
        vd.distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)]) * x
    ),
    "factories": lambda x, mesh: (
        x + vd.ones(5, 3, device_mesh=mesh, placements=[Shard(0)]) * vd.rand(5, 3, device_mesh=mesh)
    ),
    "to_torch": lambda x, mesh: DTensor.from_torch(x.to_torch()).sin(),
    "local_map": lambda x, mesh: vd.local_map(torch.sin, [Shard(0)], ([Shard(0)],))(x),
    "operations": lambda x, mesh: (x @ x.t()).softmax(-1) + x.sum().item(),
}


def outcome(function: Callable[[DTensor], Any], x: DTensor) -> list[Tensor]:
    torch.manual_seed(0)
    leaf = x.detach().requires_grad_()
    made = function(leaf)
    total = made.full_tensor() if isinstance(made, DTensor) else made
    total.sum().backward()
    return [total.detach(), leaf.grad.full_tensor(), torch.get_rng_state()]


def compared(rank: int, world_size: int, name: str) -> list[str]:
    mesh = vd.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    x = vd.distribute_tensor(torch.arange(15.0).view(5, 3) / 10, mesh, [Shard(0)])
    found: list[str] = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.extend(type(one).__name__ for one in inputs)
        return graph.forward

    torch.compiler.reset()
    function = CASES[name]
    compiled = torch.compile(lambda leaf: function(leaf, mesh), backend=backend)
    expected = outcome(lambda leaf: function(leaf, mesh), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The compiler's own, of plain tensors with a history among its arguments.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")
        for _ in range(2):
            assert all(map(torch.equal, outcome(compiled, x), expected))
    return found


@pytest.mark.parametrize("name", CASES)
def test_compiled_functions_do_as_eager_ones(name: str):
    for inputs in run(compared, 2, name):
        assert "DTensor" not in inputs


def test_arguments_results_and_names_pass():
    @untraced
    def both(one: int, *, other: int = 2) -> tuple[int, int]:
        """Both."""
        return one, other

    assert both(1) == (1, 2)
    assert both(3, other=4) == (3, 4)
    assert (both.__name__, both.__doc__) == ("both", "Both.")


def test_it_does_not_import_the_compiler():
    code = (
        "import sys, vescale_dtensor as vd\n"
        "assert vd.untraced(lambda x: x + 1)(1) == 2\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
