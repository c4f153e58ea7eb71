"""What torch's own library does with parameters and activations gives what one device gives.

Optimizers and schedules, gradient utilities, hooks, autograd's functional forms, reparametrized
modules, checkpoints, loaders. Each program runs on one device and on dp=2 x tp=2, and all that it
returns is compared.
"""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from one_device import check
from torch import nn
from torch.autograd import functional, graph
from torch.nn.utils import parametrizations, parametrize
from torch.optim import lr_scheduler, swa_utils
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils import _python_dispatch
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode
from vescale_comm.testing import run
from vescale_dtensor import Replicate, Shard

W = torch.linspace(-1, 1.5, 24).reshape(6, 4)
X = torch.linspace(-2, 3, 20).reshape(5, 4)
SQUARE = torch.eye(6) * 2 + torch.linspace(-1, 1, 36).reshape(6, 6)
SEQUENCE = torch.linspace(-1, 1, 40).reshape(2, 5, 4)
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def network(place):
    torch.manual_seed(0)
    first, second = nn.Linear(4, 6), nn.Linear(6, 4)
    if place.mesh is not None:
        first.weight = place.parameter(first.weight.detach(), Replicate(), Shard(0))
        first.bias = place.parameter(first.bias.detach(), Replicate(), Shard(0))
        second.weight = place.parameter(second.weight.detach(), Replicate(), Shard(1))
        second.bias = place.parameter(second.bias.detach(), Replicate(), Replicate())
    return nn.Sequential(first, nn.Tanh(), second)


def batch(place, whole=X):
    return place(whole, Shard(0), Replicate())


def linear(place, whole=W):
    module = nn.Linear(whole.shape[1], whole.shape[0])
    nn.init.zeros_(module.bias)
    module.weight = place.parameter(whole)
    return module


def trained(place, make, schedule=None, closure=False, double=False):
    model, inputs = network(place), batch(place)
    if double:
        model, inputs = model.double(), inputs.double()
    optimizer = make(list(model.parameters()))
    schedule = schedule(optimizer) if schedule else None

    def backward():
        optimizer.zero_grad()
        loss = model(inputs).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        if closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
        if schedule:
            schedule.step()
    return list(model.parameters())


KINDS = "SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD Adafactor"
OPTIMIZERS = {
    f"{kind}, foreach={foreach}": lambda ps, kind=kind, foreach=foreach: getattr(torch.optim, kind)(
        ps, lr=0.01, foreach=foreach
    )
    for kind in KINDS.split()
    for foreach in (None, True, False)
} | {
    f"{kind}, fused": lambda ps, kind=kind: getattr(torch.optim, kind)(ps, lr=0.01, fused=True)
    for kind in ("SGD", "Adam", "AdamW", "Adagrad")
}
OPTIMIZERS["SGD with everything"] = lambda ps: torch.optim.SGD(
    ps, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True
)
OPTIMIZERS["AdamW, amsgrad"] = lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True)
OPTIMIZERS["lr is a tensor"] = lambda ps: torch.optim.AdamW(
    ps, lr=torch.tensor(0.01), foreach=False
)


def run_optimizer(rank, world, name):
    check(lambda place: trained(place, OPTIMIZERS[name]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    run(run_optimizer, 4, name)


@program
def lbfgs(place):
    return trained(
        place, lambda ps: torch.optim.LBFGS(ps, lr=0.01, max_iter=4), closure=True, double=True
    )


@program
def lbfgs_with_line_search(place):
    def make(parameters):
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

    return trained(place, make, closure=True, double=True)


@program
def schedules(place):
    return [
        trained(
            place,
            lambda ps: torch.optim.SGD(ps, lr=torch.tensor(0.01)),
            lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
        ),
        trained(
            place,
            lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
            lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
        ),
    ]


def stepped(model, optimizer, inputs):
    model(inputs).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@program
def optimizer_states_load(place):
    model = network(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stepped(model, optimizer, batch(place))
    twin = copy.deepcopy(model)
    other = torch.optim.AdamW(twin.parameters(), lr=0.01)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(twin, other, batch(place))
    return list(twin.parameters()), other.state_dict()["state"]


@program
def averaged_models(place):
    model = network(place)
    mean = swa_utils.AveragedModel(model)
    moving = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        stepped(model, optimizer, batch(place))
        mean.update_parameters(model)
        moving.update_parameters(model)
    return list(mean.parameters()), list(moving.parameters())


def scaled(place, inputs):
    model, scaler = network(place), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        scaler.scale(model(batch(place, inputs)).square().sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return list(model.parameters()), scaler.get_scale()


@program
def gradient_scaling(place):
    return scaled(place, X)


@program
def gradient_scaling_skips_steps_on_every_rank(place):
    """The infinity is in the rows of some ranks only."""
    return scaled(place, X.index_fill(0, torch.tensor([4]), float("inf")))


@program
def autocast(place):
    model = network(place)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = model(batch(place))
    result.float().square().sum().backward()
    return str(result.dtype), [str(p.grad.dtype) for p in model.parameters()]


def with_gradients(place):
    model = network(place)
    model(batch(place)).square().sum().backward()
    return model


@program
def clipping(place):
    results = []
    for norm in (2.0, math.inf, 1.0):
        model = with_gradients(place)
        total = nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=norm)
        results.append([total, [p.grad for p in model.parameters()]])
    model = with_gradients(place)
    nn.utils.clip_grad_value_(model.parameters(), 0.3)
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total)
    return results, total, [p.grad for p in model.parameters()]


@program
def parameters_as_a_vector(place):
    model = network(place)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    return vector, list(model.parameters())


@program
def gradients_written_by_hand(place):
    results = []
    for placements in ((None, None), (Replicate(), Replicate())):
        x = place(W, *placements, grad=True)
        (x * place(W)).sum().backward()
        x.grad.mul_(2)
        x.grad.add_(1)
        (x * place(W)).sum().backward()
        results.append(x.grad.clone())
        x.grad.zero_()
        (x * 3).sum().backward()
        x.grad.data.clamp_(max=2)
        x.grad = place(W, Replicate(), Shard(0))
        (x * x).sum().backward()
        results.append(x.grad)
        x.grad = None
        (x * x).sum().backward()
        results.append(x.grad)
        del x.grad
        assert x.grad is None
    return results


@program
def zeroed_gradients(place):
    model = with_gradients(place)
    model.zero_grad(set_to_none=False)
    model(batch(place)).sum().backward()
    return [p.grad for p in model.parameters()]


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
def functional_calls(place):
    model = network(place)
    doubled = {name: p * 2 for name, p in model.named_parameters()}
    result = torch.func.functional_call(model, doubled, (batch(place),))
    result.square().sum().backward()
    detached = {name: p.detach() for name, p in doubled.items()}
    with warnings.catch_warnings(action="ignore"):
        stateless = nn.utils.stateless.functional_call(model, detached, (batch(place),))
    return result, stateless, [p.grad for p in model.parameters()]


def reparametrized(place, wrap):
    torch.manual_seed(1)
    module = linear(place, SQUARE)
    wrap(module)
    inputs = batch(place, torch.linspace(-1, 1, 30).reshape(5, 6))
    result = module(inputs)
    result.square().sum().backward()
    return result, [p.grad for p in module.parameters()]


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x):
        return x.triu()


def removed(module):
    parametrizations.weight_norm(module)
    parametrize.remove_parametrizations(module, "weight")


REPARAMETRIZED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "our own": lambda m: parametrize.register_parametrization(m, "weight", Symmetric()),
    "removed": removed,
    "householder": lambda m: parametrizations.orthogonal(
        m, orthogonal_map="householder", use_trivialization=False
    ),
}


def run_reparametrized(rank, world, name):
    check(lambda place: reparametrized(place, REPARAMETRIZED[name]))


@pytest.mark.parametrize("name", REPARAMETRIZED)
def test_reparametrized(name):
    run(run_reparametrized, 4, name)


@program
def modules_convert(place):
    model = network(place)
    model.half().float().double().requires_grad_(False).requires_grad_(True)
    model._apply(lambda t: t * 2)
    assert all(p.is_leaf and isinstance(p, nn.Parameter) for p in model.parameters())
    twin = copy.deepcopy(model)
    model.load_state_dict({k: v * 2 for k, v in twin.state_dict().items()}, assign=True)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    return list(model.parameters()), list(twin.parameters())


@program
def modules_convert_by_swapping(place):
    module = linear(place)
    with torch.no_grad():
        module(batch(place))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.double()
        module.load_state_dict({k: v * 2 for k, v in module.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    result = module(batch(place, X.double()))
    result.sum().backward()
    return result, module.weight.grad


@program
def deferred_initialisation(place):
    with torch.device("meta"):
        module = nn.Linear(4, 6)
    if place.mesh is not None:
        module.weight = place.parameter(torch.empty(6, 4, device="meta"))
    module.to_empty(device="cpu")
    torch.manual_seed(3)
    module.reset_parameters()
    return list(module.parameters())


@program
def tied_weights(place):
    embedding, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight = place.parameter(W, Replicate(), Shard(0))
    index = torch.tensor([[0, 5, 2], [1, 1, 3]])
    result = head(embedding(index))
    F.cross_entropy(result.flatten(0, 1), index.flatten()).backward()
    return result, embedding.weight.grad, head.weight is embedding.weight


@program
def lazy_and_normalised_modules(place):
    torch.manual_seed(0)
    lazy, norm = nn.LazyLinear(6), nn.BatchNorm1d(4)
    results = [lazy(batch(place)), norm(batch(place)), norm(batch(place))]
    return results, norm.eval()(batch(place)), list(norm.buffers())


def attended(place, module, **inputs):
    x = place(SEQUENCE, Shard(0), Replicate(), grad=True)
    result = module(*[x] * inputs.get("count", 1))
    result = result[0] if isinstance(result, tuple) else result
    result.square().sum().backward()
    return result, x.grad


@program
def recurrent_and_attending_modules(place):
    torch.manual_seed(0)
    return [
        attended(place, nn.LSTM(4, 3, batch_first=True)),
        attended(place, nn.MultiheadAttention(4, 2, batch_first=True), count=3),
        attended(place, nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)),
    ]


@program
def inference(place):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    with torch.inference_mode():
        return layer(place(SEQUENCE, Shard(0), Replicate()))


@program
def checkpoints_of_segments(place):
    model, x = network(place), place(X, Shard(0), Replicate(), grad=True)
    result = checkpoint_sequential(model, 2, x, use_reentrant=False)
    result.square().sum().backward()
    return result, x.grad, [p.grad for p in model.parameters()]


@program
def compiled_functions(place):
    x = place(W, grad=True)
    result = torch.compile(lambda a: (a * 2).relu() + a.sum(0), backend="eager")(x)
    result.sum().backward()
    total = torch.compile(lambda a: a.sum().item(), backend="eager")(x)
    return result, x.grad, total


@program
def loaders(place):
    data = TensorDataset(batch(place))
    return [rows for (rows,) in DataLoader(data, batch_size=2)]


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


def run_program(rank, world, name):
    check(PROGRAMS[name])


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    run(run_program, 4, name)
