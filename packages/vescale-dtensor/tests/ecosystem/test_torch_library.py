"""What torch's own library does with tensors gives what one device gives.

Hooks, autograd's functional forms, modes, compilation, loaders, Python's protocols. Each program
runs on one device and on dp=2 x tp=2, and all that it returns is compared.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from named_cases import named_cases
from one_device import check
from torch import nn
from torch.autograd import functional, graph
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils import _python_dispatch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode
from torch_library import W, batch
from vescale_comm.testing import on_ranks
from vescale_dtensor import Replicate, Shard

PROGRAMS, program = named_cases()


@program
def saved_tensor_hooks(place):
    x, kinds = place(W, grad=True), []
    with graph.saved_tensors_hooks(lambda t: kinds.append(type(t)) or t, lambda t: t):
        (x * x).sin().sum().backward()
    with graph.save_on_cpu():
        (x * x).sin().sum().backward()
    with graph.disable_saved_tensors_hooks("not here"):
        (x * x).sum().backward()
    with torch.autograd.detect_anomaly(check_nan=True):
        (x * x).sum().backward()
    return x.grad


@program
def gradient_hooks_in_order(place):
    x, called = place(W, grad=True), []
    x.register_hook(lambda g: called.append("first") or g * 2)
    x.register_hook(lambda g: called.append("second") or g + 1)
    x.register_hook(lambda g: g * 9).remove()
    x.register_post_accumulate_grad_hook(lambda p: called.append("after"))
    (x * x).sum().backward()
    return called, x.grad


@program
def retained_gradients_are_what_all_hooks_made(place):
    x = place(W, grad=True)
    inner = x * 2
    inner.register_hook(lambda g: g * 3)
    inner.retain_grad()
    outer = inner * 1 if place.mesh is None else inner.redistribute(placements=[Replicate()] * 2)
    outer.retain_grad()
    for tensor in (inner, outer):
        tensor.register_hook(lambda g: g + 1)
    (outer * outer).sum().backward()
    return x.grad, inner.grad, outer.grad, inner.retains_grad, x.retains_grad


@program
def gradients_asked_for(place):
    x, y = place(W, grad=True), place(W, grad=True)
    results = [
        torch.autograd.grad((x * 2).sum(), [x, y], allow_unused=True),
        torch.autograd.grad((x * 2).sum(), [x, y], materialize_grads=True),
        torch.autograd.grad(x * x, x, grad_outputs=place(W, Replicate(), Shard(0))),
        torch.autograd.grad(x * x, x, grad_outputs=W),
    ]
    (x * y).square().sum().backward(inputs=[x])
    assert y.grad is None
    (x * x).backward(gradient=W)
    return results, x.grad


@program
def functional_derivatives(place):
    x, row = place(W), place(W[0], Replicate(), Shard(0))
    return [
        functional.jacobian(lambda a: (a * a).sum(0), x),
        functional.vjp(lambda a: (a * a).sum(0), x, row),
        functional.jvp(lambda a: a**3, x, x),
        functional.hessian(lambda a: (a**3).sum(), x),
        functional.hvp(lambda a: (a**3).sum(), x, x),
        functional.vhp(lambda a: (a**3).sum(), x, x),
    ]


@program
def what_torch_refuses_is_refused(place):
    x = place(W, grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        x.add_(1)
    middle = x * 2
    result = middle * middle
    middle.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        result.sum().backward()
    with pytest.raises(RuntimeError, match="retain_grad"):
        place(W).retain_grad()
    with pytest.raises(RuntimeError, match="require gradient"):
        place(W).register_hook(print)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(x * 2)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(place(W), place(W) + 1)
    return torch.testing.assert_close(place(W), place(W))


@program
def compiled_functions(place):
    x = place(W, grad=True)
    result = torch.compile(lambda a: (a * 2).relu() + a.sum(0), backend="eager")(x)
    result.sum().backward()
    total = torch.compile(lambda a: a.sum().item(), backend="eager")(x)
    return result, x.grad, total


@program
def loaders(place):
    return [rows for (rows,) in DataLoader(TensorDataset(batch(place)), batch_size=2)]


class Passing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class PassingBelow(_python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@program
def under_modes(place):
    x, results = place(W), []
    for mode in (Passing(), PassingBelow(), FlopCounterMode(display=False), torch.device("cpu")):
        with mode:
            results.append(x * 2 + 1)
    with profile():
        results.append(x.sin())
    return results


@program
def python_protocols(place):
    x = place(W)
    assert torch.is_tensor(x)
    assert isinstance(nn.Buffer(place(W)), nn.Buffer)
    assert not isinstance(x, nn.Parameter)
    assert len({x, x}) == 1
    assert [x].index(x) == 0
    assert {x: 1}[x] == 1
    return [
        [row.sum() for row in x],
        len(x),
        1.5 in x,
        77.0 in x,
        "more" if x.sum() > 0 else "less",
        max(x.max(), x.min()),
        sorted([x.max(), x.min()]),
        f"{x.sum():.3f}",
        "%.3f" % x.sum(),  # noqa: UP031
        round(float(x.mean()), 4),
        math.sqrt(x.square().sum()),
        divmod(7, int(x.max() * 3)),
        torch.equal(x, place(W)),
        torch.allclose(x, W),
        x.equal(x * 2),
        bool((x != x).any()),
        list(x.max(0)),
        type(x.max(0)).__name__,
    ]


@program
def factors_that_are_tensors(place):
    """Partial sums as `alpha`, `beta` and `value`: a product of terms is no term."""
    x, y = place(W), place(W + 1)
    rows, more, total, mean = x.sum(0), y.sum(0), y.sum(), x.mean()
    return [
        torch.add(rows, more, alpha=total),
        rows.add(more, alpha=mean),
        torch.sub(rows, more, alpha=total),
        x.sum(0).add_(more, alpha=total),
        rows.addcmul(rows, more, value=total),
        x.sum(0).addcdiv_(rows, more + 9, value=mean),
        torch.addmm(place(torch.ones(6, 6)), x, y.t(), beta=total, alpha=mean),
        torch.add(other=rows, input=more, alpha=3),
        torch._foreach_add([rows, more], [more, rows], alpha=2),
        torch._foreach_mul([rows, more], total),
    ]


@program
def sums_that_round_first(place):
    rows = place(W * 3).sum(0)
    return [
        rows.sum(dtype=torch.int64),
        torch.sum(rows, 0, dtype=torch.int32),
        rows.sum(dtype=torch.float64),
        torch.sum(rows, dtype=torch.bool),
        rows.prod(dtype=torch.int64),
        rows.cumsum(0, dtype=torch.int64),
        rows.long(),
    ]


@program
def sizes_that_are_tensors(place):
    """As `torch.div(n, 2, rounding_mode="floor")` gives them, and changing from call to call."""
    x, found = place(W), []
    for size in (2, 3, 6, 2):
        n = torch.tensor(size)
        one = place(n, Replicate(), Replicate())
        found += [
            x.view(n, 24 // n),
            x.reshape((-1, one)),
            x.expand(n, 6, 4),
            x.repeat(n, 1),
            x.split(n)[0],
            x.chunk(chunks=one)[-1],
            x.sum(n - n),
            torch.sum(input=x, dim=n - n),
            x.transpose(n - n, 1),
            x.narrow(0, n - n, n),
            F.pad(x, (n, 1)),
        ]
    return found


@program
def windows_on_what_is_dense(place):
    """As Longformer cuts its sequences into windows that overlap."""
    x, y = place(W, grad=True), place(W.clone(), grad=True)
    found = [
        (x * 1).as_strided((5, 8), (4, 1)),
        torch.as_strided((x * 1).t(), (2, 3, 4), (8, 4, 1)),
        torch.as_strided_copy(y, (3,), (7,)),
    ]
    sum((r * r).sum() for r in found).backward()
    return found, x.grad, y.grad


@program
def rows_that_look_at_nothing(place):
    """Their attention is nothing, and so are their gradients: with dropout as without."""
    x = place(torch.linspace(-1, 1, 96).reshape(2, 4, 3, 4), Shard(0), Shard(1), grad=True)
    seen = torch.tensor([[True, False, False], [False] * 3, [True, True, False]])
    found = []
    for p in (0.0, 0.4):
        for mask in (seen, torch.zeros(3, 3).masked_fill(~seen, -torch.inf)):
            torch.manual_seed(3)
            found.append(F.scaled_dot_product_attention(x, x, x, mask, dropout_p=p))
    sum(r.square().sum() for r in found).backward()
    return found, x.grad


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(4)
def test_programs(name):
    check(PROGRAMS[name])
