"""Whoever holds parameters from before `parallelize` goes on rightly (optimizers, at any step) or
is refused by name on every rank: nothing trains, clips or averages the old objects in silence.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.prune import l1_unstructured
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_dtensor import DTensor
from vescale_parallel import DisagreementError, Plan, PlanError, StaleParameterError, parallelize
from vescale_parallel import mesh as make_mesh

WORLD = 4


class Net(nn.Module):
    """A shared weight, a scalar, an uneven width."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(10, 5), nn.Linear(5, 7), nn.Linear(7, 5)
        self.gain, self.head = nn.Parameter(torch.tensor(0.5)), nn.Linear(5, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.gain * self.down(torch.tanh(self.up(x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


PLAN = Plan(
    parameters={
        "up.*": "tp:0",
        "down.weight": "tp:1",
        "{embed,head}.weight": "tp:0",
        "*": "replicate",
    }
)
TOKENS = torch.randint(10, (6, 3), generator=torch.Generator().manual_seed(1))


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def mesh() -> Any:
    return make_mesh(dp=2, tp=2, device_type="cpu")


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    decay = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 3e-3}]


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "sgd": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda m: optim.AdamW(m.parameters(), lr=1e-2),
    "adamw_loop": lambda m: optim.AdamW(m.parameters(), lr=1e-2, foreach=False, amsgrad=True),
    "adamw_groups": lambda m: optim.AdamW(in_groups(m), lr=1e-2),
    "adagrad": lambda m: optim.Adagrad(m.parameters(), lr=0.1),  # makes its state at once
    "adafactor": lambda m: optim.Adafactor(m.parameters(), lr=1e-2),  # rows and columns
    "lbfgs": lambda m: optim.LBFGS(m.parameters(), lr=0.5, max_iter=2),  # keeps the list
}


def train(model: nn.Module, optimizer: optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(TOKENS)
        loss.backward()
        return loss

    losses = []
    for _ in range(steps):
        loss = closure()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(closure if isinstance(optimizer, optim.LBFGS) else None)
        scheduler.step()
        losses += [loss.item(), norm.item()]
    return losses


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(WORLD, simulated=True)
def test_an_optimizer_made_before_steps_the_distributed_parameters(name: str, before: int):
    """`before` steps on the plain model, then the mesh, with what was made at the beginning."""
    found = []
    for parallel in (False, True):
        model = make()
        optimizer = OPTIMIZERS[name](model)
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        losses = train(model, optimizer, scheduler, before)
        optimizer.zero_grad()
        if parallel:
            parallelize(model, mesh(), PLAN)
        found.append(losses + train(model, optimizer, scheduler, 3))
        if parallel:
            in_model = {id(p) for p in model.parameters()}
            held = [p for group in optimizer.param_groups for p in group["params"]]
            assert {id(p) for p in held} == in_model
            assert {id(p) for p in optimizer.state} <= in_model
            # It can be stored and loaded as one that was made afterwards.
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    # A learning run, not one that stands still on both sides.
    assert found[0][-2] < 0.999 * found[0][0]


@on_ranks(WORLD, simulated=True)
def test_other_states_on_one_rank_are_named(rank: int, world_size: int):
    model = make()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(TOKENS).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 2:
        optimizer.state[model.up.weight]["momentum_buffer"].mul_(2)
    with pytest.raises(DisagreementError) as caught:
        parallelize(model, mesh(), PLAN)
    assert "state of 'SGD 1: up.weight momentum_buffer': (7, 5) checksum " in str(caught.value)
    assert "on ranks 0, 1, 3; (7, 5) checksum " in str(caught.value)


def clipped(old: dict[str, nn.Parameter], model: nn.Module) -> None:
    clip_grad_norm_(list(old.values()), 1.0)


def averaged(old: dict[str, nn.Parameter], model: nn.Module) -> None:
    torch.zeros(7, 5).lerp_(old["up.weight"], 0.1)


def averaged_in_lists(old: dict[str, nn.Parameter], model: nn.Module) -> None:
    plain = list(old.values())
    torch._foreach_lerp_([torch.zeros(p.size()) for p in plain], plain, 0.1)


def into_the_new(old: dict[str, nn.Parameter], model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("up.weight").copy_(old["up.weight"])


STALE: dict[str, Callable[[dict[str, nn.Parameter], nn.Module], Any]] = {
    "clip": clipped,
    "average": averaged,
    "average of lists": averaged_in_lists,
    "gradient": lambda old, model: old["up.weight"].grad,
    "no gradient": lambda old, model: setattr(old["up.weight"], "grad", None),
    "data": lambda old, model: old["up.weight"].data,
    "shape": lambda old, model: old["up.weight"].shape,
    "item": lambda old, model: old["gain"].item(),
    "product": lambda old, model: torch.ones(2, 7) @ old["up.weight"],
    "freeze": lambda old, model: old["up.weight"].requires_grad_(False),
    "hook": lambda old, model: old["up.weight"].register_hook(print),
    "write": lambda old, model: nn.init.zeros_(old["up.weight"]),
    "new optimizer": lambda old, model: optim.SGD(list(old.values()), lr=1.0),
    "autograd": lambda old, model: torch.autograd.grad(model(TOKENS), [old["up.weight"]]),
    "into the new one": into_the_new,
    "functional_call": lambda old, model: torch.func.functional_call(model, old, TOKENS),
    "store": lambda old, model: copy.deepcopy(old["up.weight"]),
}


def stale(rank: int, world_size: int) -> dict[str, str]:
    model = make()
    old = dict(model.named_parameters())
    parallelize(model, mesh(), PLAN)
    model(TOKENS).backward()
    told = {}
    for name, use in STALE.items():
        with pytest.raises(StaleParameterError) as caught:
            use(old, model)
        told[name] = str(caught.value)
    assert repr(old["up.weight"]) == "<parameter 'up.weight' from before parallelize>"
    assert {old["up.weight"]: 1}[old["up.weight"]] == 1
    return told


def test_any_other_use_of_an_old_object_is_refused_by_name():
    told = simulate(WORLD)(stale)
    for of_rank in told:
        for name, text in of_rank.items():
            assert text == told[0][name]
            assert "of the object that was parameter '" in text
            assert "model.get_parameter('" in text
    assert told[0]["gradient"].startswith("torch.Tensor.grad.__get__ of the object")
    assert told[0]["autograd"].startswith("grad of the object")


@on_ranks(WORLD, simulated=True)
def test_a_state_dict_from_before_keeps_its_values():
    model = make()
    saved = model.state_dict()
    before = saved["up.weight"].clone()
    parallelize(model, mesh(), PLAN)
    # What was taken before keeps its values, though the parameter has given its memory back.
    assert torch.equal(saved["up.weight"], before)
    assert torch.equal(model.up.weight.full_tensor(), before)


class TiedOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()
        self.outer = nn.Linear(5, 7)
        self.outer.weight = self.inner.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x)


@on_ranks(WORLD, simulated=True)
def test_a_module_that_is_tied_from_outside_does_not_go_on_with_the_old_weight():
    torch.manual_seed(0)
    model = TiedOutside()
    parallelize(model.inner, mesh(), PLAN)
    with pytest.raises(StaleParameterError, match=r"'up.weight'"):
        model(torch.ones(2, 5))


@on_ranks(WORLD, simulated=True)
def test_pruning_a_model_whose_parameters_are_gathered_is_refused_by_name():
    model = parallelize(make(), mesh(), Plan(zero=3))
    l1_unstructured(model.up, "weight", 0.5)
    with pytest.raises(StaleParameterError, match=r"'up.weight' was taken out .*prune"):
        model(TOKENS)


class InLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.ones(4))})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales[0] + self.scales[1] * self.shifts["a"]


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        parameters = dict(self.inner.named_parameters())
        return torch.func.functional_call(self.inner, parameters, x)


class Sequences(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner = kind(4, 3, batch_first=True, bidirectional=True, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x[:, None])[0]
        return result


class KeptInAList(nn.Module):
    """Its own list, of which no assignment tells it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.kept = [self.inner.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kept[0]


def pruned() -> nn.Module:
    return l1_unstructured(nn.Linear(4, 4), "weight", 0.5)


PLACES: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "pruned": pruned,
    "lists": InLists,
    "functional_call": Functional,
    "rnn": lambda: Sequences(nn.RNN),
    "gru": lambda: Sequences(nn.GRU),
    "lstm": lambda: Sequences(nn.LSTM),
}


def few_steps(model: nn.Module, optimizer: optim.Optimizer) -> list[float]:
    x = torch.ones(4, 4) * torch.arange(1.0, 5.0)[:, None]
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@on_ranks(WORLD, simulated=True)
def test_wherever_modules_keep_parameters_the_new_ones_are_trained():
    here = mesh()
    for name, build in PLACES.items():
        found = []
        for parallel in (False, True):
            torch.manual_seed(0)
            model = build()
            optimizer = optim.SGD(model.parameters(), lr=0.05)
            if parallel:
                parallelize(model, here, Plan(parameters={"*": "replicate"}))
            found.append(torch.tensor(few_steps(model, optimizer)))
        torch.testing.assert_close(found[1], found[0], msg=lambda text, at=name: f"{at}: {text}")
        assert found[0][2] < found[0][0], name
    model = KeptInAList()
    parallelize(model, here, Plan(parameters={"*": "replicate"}))
    with pytest.raises(StaleParameterError, match=r"'inner.weight'"):
        model(torch.ones(4, 4))


@on_ranks(WORLD, simulated=True)
def test_averages_of_the_model():
    """An average made before is plain and takes global values; one made after is distributed."""
    model, plain = make(), make()
    early = optim.swa_utils.AveragedModel(model)
    reference = optim.swa_utils.AveragedModel(plain)
    parallelize(model, mesh(), PLAN)
    late = optim.swa_utils.AveragedModel(model)
    for one, averages in ((plain, [reference]), (model, [late])):
        optimizer = optim.SGD(one.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            one(TOKENS).backward()
            optimizer.step()
            for average in averages:
                average.update_parameters(one)
    for wanted, found in zip(reference.parameters(), late.parameters(), strict=True):
        torch.testing.assert_close(found.detach().full_tensor(), wanted.detach())
    early.update_parameters(model)
    for one, two in zip(early.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), two.detach().full_tensor())


REFUSED: dict[str, tuple[Callable[[Net], Any], str]] = {
    "hook": (lambda m: m.up.weight.register_hook(print), "have hooks (register_hook)"),
    "post-accumulate hook": (
        lambda m: m.up.weight.register_post_accumulate_grad_hook(print),
        "have hooks (register_post_accumulate_grad_hook)",
    ),
    "lazy": (lambda m: setattr(m, "more", nn.LazyLinear(3)), "'more.weight', 'more.bias' are lazy"),
    "special": (
        lambda m: setattr(m.up, "weight", Quantized(m.up.weight.detach())),
        "of type 'Quantized' compute by themselves and cannot be distributed: 'up.weight'",
    ),
}


class Quantized(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@on_ranks(WORLD, simulated=True)
def test_what_would_be_left_behind_is_refused():
    here = mesh()
    for edit, message in REFUSED.values():
        model = make()
        edit(model)
        with pytest.raises(PlanError) as caught:
            parallelize(model, here, PLAN)
        assert message in str(caught.value)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
