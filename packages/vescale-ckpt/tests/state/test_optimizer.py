"""Training that was saved and restored goes on as if it had not stopped, with any optimizer."""

import pytest
import torch
from vescale_ckpt import WHOLE, init_optimizer_state, load, save

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW amsgrad, two groups": lambda p: torch.optim.AdamW(
        [{"params": p[:1]}, {"params": p[1:], "lr": 0.3}], amsgrad=True
    ),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
}


def training(make):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    model[1].bias.requires_grad_(False)
    optimizer = make(list(model.parameters()))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def steps(model, optimizer, scheduler, n):
    losses = []
    for i in range(n):
        loss = model(torch.full((2, 4), float(i + 1))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("how", ["init_optimizer_state", "WHOLE"])
def test_resumed_training_is_the_same_training(path, make, how):
    model, optimizer, scheduler = training(make)
    steps(model, optimizer, scheduler, 3)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    save(path, {**state, "sched": scheduler.state_dict()})
    expected = steps(model, optimizer, scheduler, 3)

    model, optimizer, scheduler = training(make)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if how == "init_optimizer_state":
        init_optimizer_state(optimizer)
    into = {
        "model": model.state_dict(),
        "optim": WHOLE if how == "WHOLE" else optimizer.state_dict(),
        "sched": scheduler.state_dict(),
    }
    loaded = load(path, into)
    optimizer.load_state_dict(loaded["optim"])
    scheduler.load_state_dict(loaded["sched"])
    assert steps(model, optimizer, scheduler, 3) == expected


def test_state_made_by_hand(path):
    # What init_optimizer_state does for any optimizer, written out for one.
    model, optimizer, scheduler = training(OPTIMIZERS["AdamW"])
    steps(model, optimizer, scheduler, 1)
    save(path, {"optim": optimizer.state_dict()})
    _, fresh, _ = training(OPTIMIZERS["AdamW"])
    for parameter in fresh.param_groups[0]["params"]:
        if parameter.requires_grad:
            fresh.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    fresh.load_state_dict(load(path, {"optim": fresh.state_dict()})["optim"])
    for old, new in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert all(old[key].equal(new[key]) for key in old)


def test_init_optimizer_state_changes_no_parameter_and_no_setting():
    for make in OPTIMIZERS.values():
        model, optimizer, _ = training(make)
        before = [p.detach().clone() for p in model.parameters()]
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        model[0].bias.grad = torch.ones(8)
        init_optimizer_state(optimizer)
        assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))
        assert [float(group["lr"]) for group in optimizer.param_groups] == rates
        assert model[0].bias.grad.tolist() == [1] * 8
        assert model[0].weight.grad is None
        trainable = [p for p in model.parameters() if p.requires_grad]
        assert all(optimizer.state[p] for p in trainable)


def test_init_optimizer_state_leaves_existing_state_alone():
    model, optimizer, scheduler = training(OPTIMIZERS["AdamW"])
    steps(model, optimizer, scheduler, 2)
    before = optimizer.state[model[0].weight]["exp_avg"].clone()
    init_optimizer_state(optimizer)
    assert optimizer.state[model[0].weight]["exp_avg"].equal(before)
    assert optimizer.state[model[0].weight]["step"] == 2
