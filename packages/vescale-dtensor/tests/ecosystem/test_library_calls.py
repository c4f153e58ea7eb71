"""What other people's libraries do in passing works with DTensors, or raises at once.

Constructors that are given tensors, memory that nobody has written to, parts that are compiled as
one graph, and workers that load data.
"""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
import vescale_dtensor as vd
from on_mesh import on_mesh
from one_device import check
from torch import nn
from torch.utils.data import DataLoader, Dataset
from vescale_comm import simulate
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import Replicate, Shard, UnsupportedError
from vescale_dtensor._dispatch import plain_operands

torch.manual_seed(0)
WHOLE = torch.arange(24.0).reshape(4, 6)


def _constructors_and_gradients(place):
    x = place(WHOLE, grad=True)
    assert not torch.tensor(x).requires_grad
    wide = torch.as_tensor(x, dtype=torch.float64)
    of_more = torch.as_tensor(x * 2, dtype=torch.float64)
    leaf = torch.tensor(x, requires_grad=True)
    assert leaf.requires_grad
    loss = (wide * wide).sum() + (torch.Tensor(x) * 3).sum() + (of_more * leaf).sum()
    loss.backward()
    return x.grad, leaf.grad


@on_ranks(4, simulated=True)
def test_constructors_and_gradients():
    with warnings.catch_warnings(action="ignore"):
        check(_constructors_and_gradients)


def _garbage(rank, *shape):
    """What `torch.empty` may give: other values on each rank."""
    return torch.full(shape, torch.nan if rank else 7.0)


UNREAD = {
    "addmm": lambda x, g: torch.addmm(g(4, 4), x, x.t(), beta=0),
    "addmm in place": lambda x, g: g(4, 4).addmm_(x, x.t(), beta=0),
    "baddbmm": lambda x, g: torch.baddbmm(g(1, 4, 4), x[None], x.t()[None], beta=0),
    "addbmm": lambda x, g: torch.addbmm(g(4, 4), x[None], x.t()[None], beta=0),
    "addmv": lambda x, g: torch.addmv(g(4), x, x[0], beta=0),
    "addr": lambda x, g: torch.addr(g(6, 6), x[0], x[0], beta=0),
    "fill_": lambda x, g: g(4).fill_(x.sum()),
    "copy_": lambda x, g: g(4, 6).copy_(x),
    "_foreach_copy_": lambda x, g: torch._foreach_copy_([g(4, 6)], [x])[0],
    "index_copy_": lambda x, g: g(4, 6).index_copy_(0, torch.arange(4), x),
    "masked_fill_": lambda x, g: g(4, 6).masked_fill_(torch.ones(4, 6, dtype=torch.bool), x.sum()),
    "view_as": lambda x, g: x.view_as(g(4, 6)),
    "reshape_as": lambda x, g: x.reshape_as(g(6, 4)),
    "expand_as": lambda x, g: x[0].expand_as(g(4, 6)),
    "type_as": lambda x, g: x.type_as(g(3)),
    "out": lambda x, g: torch.mm(x, x.t(), out=g(4, 4)),
}


@pytest.mark.parametrize("name", UNREAD)
@on_ranks(2, simulated=True)
def test_uninitialised_memory_is_not_compared(rank, world_size, name):
    logging.disable(logging.WARNING)
    x = vd.distribute_tensor(WHOLE, device_mesh((2,)), [Shard(0)])
    found = UNREAD[name](x, lambda *shape: _garbage(rank, *shape))
    found = found.full_tensor() if isinstance(found, vd.DTensor) else found
    torch.testing.assert_close(found, UNREAD[name](WHOLE, lambda *shape: torch.zeros(shape)))


def _read(rank, world_size):
    x = vd.distribute_tensor(WHOLE, device_mesh((2,)), [Shard(0)])
    for call in (
        lambda g: torch.addmm(g(4, 4), x, x.t()),
        lambda g: torch.addmm(g(4, 4), x, x.t(), beta=0.5),
        lambda g: x + g(4, 6),
    ):
        with pytest.raises(vd.DisagreementError):
            call(lambda *shape: _garbage(rank, *shape))


def test_memory_that_is_read_is_compared():
    # Other tests of this process may have filled the table of what is compared.
    plain_operands.reset_comparisons()
    simulate(2)(_read)


graphs = []


def _noting(graph, _):
    graphs.append(graph)
    return graph.forward


@torch.compile(fullgraph=True, backend=_noting)
def _update(p, g, m, lr):
    m.lerp_(g, 0.1)
    p.add_(m, alpha=-lr)


class Compiling(torch.optim.Optimizer):
    """Compiles its update of its own accord, as timm's and torchao's do."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if closure is not None:
                    closure()
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                _update(p, p.grad, state["m"], group["lr"])


def _trained(model, x):
    optimizer = Compiling(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


kept = []


def _fails():
    raise ValueError("a closure of the user's")


def _steps(mesh):
    torch.manual_seed(0)
    dense, x = nn.Linear(6, 4), torch.randn(4, 6)
    ours = copy.deepcopy(dense)
    for name, p in list(ours.named_parameters()):
        setattr(ours, name, nn.Parameter(vd.distribute_tensor(p.detach(), mesh, [Shard(0)])))
    found = _trained(ours, vd.distribute_tensor(x, mesh, [Replicate()]))
    with torch.compiler.set_stance("force_eager"):
        wanted = _trained(dense, x)
    for p, q in zip(found, wanted, strict=True):
        torch.testing.assert_close(p.full_tensor(), q)
    failing = Compiling(ours.parameters(), 0.1)
    with pytest.raises(ValueError, match="user's"):
        failing.step(_fails)
    kept.append(failing)  # its step ended by raising, and it lives on


# torch 2.12 says that a function which is to be compiled as one was not: here it is none's wish.
@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no:UserWarning")
def test_optimizers_that_compile_their_update():
    graphs.clear()
    on_mesh((2,), _steps)
    assert not graphs
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    Compiling([p], 0.1).step()
    assert graphs  # what has no DTensor is compiled as before, also after a step that raised


class Items(Dataset):
    def __init__(self, item):
        self.item = item

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.item(index)


TOUCHES = {
    "an op": lambda x, i: (x * 2).to_local(),
    "a known op": lambda x, i: (x + 1).to_local(),
    "an index": lambda x, i: x[i],
    "a number": lambda x, i: x.sum().item(),
    "full_tensor": lambda x, i: x.full_tensor(),
    "from_local": lambda x, i: vd.DTensor.from_local(torch.ones(2), x.device_mesh, [Shard(0)]),
    "distribute_tensor": lambda x, i: vd.distribute_tensor(torch.ones(2), x.device_mesh),
    "a factory": lambda x, i: vd.zeros(2, device_mesh=x.device_mesh),
}


@pytest.mark.parametrize("name", TOUCHES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads
@on_ranks(2, simulated=True)
def test_workers_that_touch_a_dtensor_raise_at_once(name):
    x = vd.distribute_tensor(WHOLE, device_mesh((2,)), [Shard(0)])
    for _ in range(3):
        x + 1
    if name == "an op":  # what asks for no data is no touch
        plain = list(DataLoader(Items(lambda i: torch.tensor(x.shape[0] + i)), num_workers=1))
        assert [t.item() for t in plain] == [4, 5]
    loading = iter(DataLoader(Items(lambda i: TOUCHES[name](x, i)), num_workers=1, timeout=60))
    with pytest.raises(UnsupportedError, match="DataLoader worker 0: it is no rank"):
        list(loading)
    # The error is in a cycle with the loader, which as garbage waits five seconds for its worker.
    loading._shutdown_workers()
    assert (x + 1).sum().item() == (WHOLE + 1).sum().item()
