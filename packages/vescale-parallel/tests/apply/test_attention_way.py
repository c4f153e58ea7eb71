"""`Plan(sequence=)`: what a plan asks of attention holds in every call of it, and nowhere else."""

import copy
from functools import partial

import pytest
import torch
import vescale_rng
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from vescale_comm import simulate, trace
from vescale_dtensor import attention_way, capture
from vescale_parallel import Plan, PlanError, mesh, parallelize


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.fails = nn.Linear(12, 36), nn.Linear(12, 12), False

    def forward(self, x):
        if self.fails:
            raise ZeroDivisionError
        parts = [one.unflatten(-1, (3, 4)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1)]
        found = F.scaled_dot_product_attention(*parts, dropout_p=0.3, is_causal=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Again(nn.Module):
    """A block that computes its attention again, as models do by themselves."""

    def __init__(self):
        super().__init__()
        self.inner = Attention()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def step(block, plan=None, static=False, policy="native", tokens=9):
    """The loss and a gradient of one step, and the collectives of both."""
    torch.manual_seed(0)
    model = nn.Sequential(block(), block())
    if plan is not None:
        parallelize(model, mesh(cp=4, device_type="cpu"), plan, static=static)
    torch.manual_seed(1)
    x = torch.randn(2, tokens, 12)
    with trace() as sent:
        with vescale_rng.use(policy):
            loss = model(x).square().mean()
        loss.backward()
    gradient = next(model.parameters()).grad
    assert attention_way() == "auto"
    if plan is None:
        return loss.item(), gradient, set()
    return loss.item(), gradient.full_tensor(), {one.op for one in sent.records}


WAYS = {"ring": "permute", "gather": "all_gather"}


PLACES = [
    (Attention, {}, False),
    (Attention, {}, True),
    (Again, {}, False),
    (Attention, {"checkpoint": "full"}, False),
    (Again, {"checkpoint": {"*.inner": "full", "*": "none"}}, False),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("block", "words", "static"), PLACES)
def test_it_holds_in_forward_and_where_that_is_computed_again(way, block, words, static):
    plan = Plan(batch="cp:1", sequence=way, **words)
    loss, gradient, _ = step(block)
    for found, other, ops in simulate(4).run(lambda rank, n: step(block, plan, static)):
        assert found == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-6)
        assert WAYS[way] in ops
        assert not ops & (set(WAYS.values()) | {"all_to_all"}) - {WAYS[way]}


@pytest.mark.parametrize("way", ["auto", *WAYS])
def test_fewer_tokens_than_ranks(way):
    """Ranks without rows take part, and every rank has one device's numbers."""
    plan = Plan(batch="cp:1", sequence=way)
    for tokens in (3, 1):
        loss, gradient, _ = step(Attention, tokens=tokens)
        run = partial(step, Attention, plan, tokens=tokens)
        for found, other, _ in simulate(4).run(lambda rank, n, run=run: run()):
            assert found == pytest.approx(loss, rel=1e-5)
            torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-6)


def test_a_step_around_the_model_is_captured():
    """The way changes inside of what is recorded, where the model begins and ends."""

    def program(rank, world_size):
        torch.manual_seed(0)
        model = nn.Sequential(Attention(), Attention())
        parallelize(model, mesh(cp=4, device_type="cpu"), Plan(batch="cp:1", sequence="ring"))
        x, found = torch.randn(2, 9, 12), []

        def forward(x):
            return model(x).square().mean()

        captured = capture(forward)
        for run in (forward, captured, captured):
            torch.manual_seed(1)
            loss = run(x)
            found.append([loss.item(), *torch.autograd.grad(loss, list(model.parameters()))])
        return captured.programs, [[one[0], one[1].full_tensor()] for one in found]

    for programs, (eager, *replayed) in simulate(4).run(program):
        assert len(programs) == 1
        for loss, gradient in replayed:
            assert loss == eager[0]
            assert torch.equal(gradient, eager[1])


def test_a_recomputation_draws_by_the_policy_of_its_forward():
    """Backward is called outside of the block: other masks would be wrong, and look right."""
    plan = Plan(batch="cp:1", checkpoint="full")
    without = Plan(batch="cp:1")

    def program(rank, world_size):
        return [step(Attention, one, policy="portable")[:2] for one in (plan, without)]

    for (loss, gradient), (found, other) in simulate(4).run(program):
        assert loss == found
        assert torch.equal(gradient, other)


def test_it_ends_with_the_model_also_where_that_raises_and_is_copied():
    def program(rank, world_size):
        model = nn.Sequential(Attention(), Attention())
        parallelize(model, mesh(cp=4, device_type="cpu"), Plan(batch="cp:1", sequence="ring"))
        copied = copy.deepcopy(model)
        model[1].fails = True
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(2, 8, 12))
        ways = [attention_way()]
        with trace() as sent:
            copied(torch.randn(2, 8, 12))
        return ways, {one.op for one in sent.records}

    assert simulate(4).run(program) == [(["auto"], {"permute"})] * 4


def test_the_plan_says_it():
    plan = Plan(batch="dp:0, cp:1", sequence="ring")
    assert Plan.from_json(plan.to_json()) == Plan.from_toml(plan.to_toml()) == plan
    assert "attention by 'ring'" in str(plan.check(nn.Linear(2, 2), {"dp": 2, "cp": 2}))


CANNOT_SAY = [
    ({"sequence": "zigzag", "batch": "cp:1"}, "expected one of.*'ring'.*got 'zigzag'"),
    ({"sequence": "ring"}, "batch='dp:0' shards none: add an axis"),
    ({"sequence": 3}, "got 3"),
]


@pytest.mark.parametrize(("words", "message"), CANNOT_SAY)
def test_what_a_plan_cannot_say(words, message):
    with pytest.raises(PlanError, match=message):
        Plan(**words)
