"""A model and its optimizer, twice: the steps of one are helped, the other's are not.

A step hook of its own, which does nothing, lets an optimizer step its parameters one by one.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from vescale_parallel import forward_backward
from zero_models import batch, local

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adadelta": optim.Adadelta,
    "Adagrad": optim.Adagrad,
    "Adam, amsgrad": lambda p: optim.Adam(p, amsgrad=True, weight_decay=0.1, maximize=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2),
    "AdamW, foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW, tensor lr": lambda p: optim.AdamW(p, lr=torch.tensor(1e-2)),
    "NAdam": optim.NAdam,
    "RAdam": lambda p: optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "SGD": lambda p: optim.SGD(p, lr=1e-2),
    "SGD, momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}
Pair = tuple[nn.Module, optim.Optimizer]


def require_alike(one: Pair, two: Pair) -> None:
    """Parameters and all that optimizers remember have the same bits."""
    for (name, p), q in zip(one[0].named_parameters(), two[0].parameters(), strict=True):
        assert torch.equal(local(p), local(q)), name
        ours, theirs = one[1].state.get(p) or {}, two[1].state.get(q) or {}
        assert list(ours) == list(theirs), name
        for key, value in ours.items():
            other = theirs[key]
            alike = torch.equal(local(value), local(other)) if isinstance(value, Tensor) else True
            assert alike, (name, key)
            assert type(value) is type(other), (name, key)
    assert len(one[1].state) == len(two[1].state)
    groups = zip(one[1].param_groups, two[1].param_groups, strict=True)
    assert all(len(g["params"]) == len(h["params"]) for g, h in groups)


def load(pair: Pair, number: int) -> None:
    pair[1].load_state_dict(copy.deepcopy(pair[1].state_dict()))


def replace_gradients(pair: Pair, number: int) -> None:
    for parameter in pair[0].parameters():
        parameter.grad = parameter.grad * 2


def leave_out(pair: Pair, number: int) -> None:
    pair[0].blocks[0].mlp.down.weight.grad = None


def count_anew(pair: Pair, number: int) -> None:
    for state in pair[1].state.values():
        state["step"].fill_(7)


def count_one_anew(pair: Pair, number: int) -> None:
    pair[1].state[pair[0].blocks[1].norm.weight]["step"] += 3


def forget(pair: Pair, number: int) -> None:
    pair[1].state[pair[0].blocks[1].mlp.up.weight]["exp_avg"].zero_()


def exchange(pair: Pair, number: int) -> None:
    state = pair[1].state[pair[0].blocks[1].mlp.up.weight]
    state["exp_avg"] = state["exp_avg"] * 0.5


def drop(pair: Pair, number: int) -> None:
    pair[1].state.pop(pair[0].blocks[1].mlp.up.weight)


def anneal(pair: Pair, number: int) -> None:
    pair[1].param_groups[0]["lr"] *= 0.5


def write_parameter(pair: Pair, number: int) -> None:
    with torch.no_grad():
        pair[0].head.weight.mul_(0.9)
        pair[0].blocks[0].norm.weight.data = pair[0].blocks[0].norm.weight.data * 1.1


def divide_groups(pair: Pair, number: int) -> None:
    group = pair[1].param_groups[0]
    if number == 1:  # in the second step only
        pair[1].add_param_group({"params": [group["params"].pop(3)], "lr": 3e-3})


def freeze(pair: Pair, number: int) -> None:
    pair[0].blocks[0].norm.weight.requires_grad_(False)
    pair[0].blocks[0].norm.weight.grad = None


CHANGES = (
    load,
    replace_gradients,
    leave_out,
    count_anew,
    count_one_anew,
    forget,
    exchange,
    drop,
    anneal,
    write_parameter,
    divide_groups,
    freeze,
)


def twins(build: Callable[[], nn.Module], optimizer: Any) -> tuple[Pair, Pair]:
    """The model with its optimizer, which is helped, and one that is not."""
    models = [build() for _ in range(2)]
    helped, single = (optimizer(model.parameters()) for model in models)
    single.register_step_pre_hook(lambda *_: None)
    return (models[0], helped), (models[1], single)


def backward(pair: Pair, seed: int, **words: Any) -> None:
    pair[1].zero_grad()
    torch.manual_seed(seed)
    forward_backward(pair[0], *batch(seed), **words)


def step(pair: Pair, seed: int) -> None:
    backward(pair, seed)
    nn.utils.clip_grad_norm_(pair[0].parameters(), 1.0)
    pair[1].step()


def train_changed(pairs: tuple[Pair, Pair], change: Callable[[Pair, int], None]) -> None:
    """Steps, of which the second and the third come after a change: both stay alike."""
    for seed in range(5):
        for pair in pairs:
            backward(pair, seed)
            if seed in (1, 2):
                change(pair, seed)
            pair[1].step()
        require_alike(*pairs)


def train_scaled(pair: Pair, assigned: bool) -> None:
    """Three steps with a loss scale; `assigned` puts other tensors in the place of gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # on every rank: of stages only one has the loss
    for seed in range(3):
        backward(pair, seed, loss=scaler.scale)
        if assigned:
            replace_gradients(pair, seed)
        scaler.step(pair[1])
        scaler.update()


def require_whole_after_errors(pairs: tuple[Pair, Pair]) -> None:
    """A step that raises leaves the optimizer as it was, and the next one goes on."""
    for seed in range(4):
        for pair in pairs:
            step(pair, seed)
            group = pair[1].param_groups[0]
            group["betas"] = None
            with pytest.raises(TypeError):
                step(pair, seed)
            group["betas"] = (0.9, 0.999)
        require_alike(*pairs)
    model, optimizer = pairs[0]
    assert sorted(optimizer.state_dict()["state"]) == list(range(len(list(model.parameters()))))
