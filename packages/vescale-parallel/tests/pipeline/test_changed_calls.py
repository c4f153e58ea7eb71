"""What changes between calls of `forward_backward`, or differs between ranks, is never silent."""

from typing import Any

import pytest
import torch
from stage_runs import accumulate, require_gradients, staged
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_parallel import (
    Invariant,
    ParallelError,
    PipelineError,
    Plan,
    forward_backward,
    parallelize,
)
from vescale_parallel import mesh as make_mesh
from zero_models import PARAMETERS, Decoder


def make() -> nn.Module:
    torch.manual_seed(3)
    return Decoder(blocks=2)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


STAGES = Plan(parameters=PARAMETERS, pipeline="1f1b", microbatches=2)


def build(how: Plan | None = None, **sizes: int) -> nn.Module:
    model = make()
    torch.manual_seed(11)
    return parallelize(model, make_mesh(device_type="cpu", **sizes), how or STAGES)


@on_ranks(2, simulated=True)
def test_training_after_an_evaluation_in_inference_mode():
    """In the same modes as the training: what was learned from it must not say what needs grads."""
    model, plain = build(pp=2), make()
    with torch.inference_mode():
        forward_backward(model, *batch(0))
    for seed in range(2):  # accumulated
        torch.manual_seed(seed)
        accumulate(plain, 2, *batch(seed))
        torch.manual_seed(seed)
        forward_backward(model, *batch(seed))
    require_gradients(model, plain)


@on_ranks(2, simulated=True)
def test_what_ranks_pass_is_compared(rank: int, world_size: int):
    model = build(pp=2)
    forward = model.forward
    model.forward = lambda tokens, targets, flag=None, scale=1.0: forward(tokens, targets) * scale
    by_position: tuple[Any, ...] = (bool(rank),)
    for more, words in ((by_position, {}), ((), {"scale": 1.0 + rank})):
        with pytest.raises(ParallelError, match=r"argument .*on rank 0; .*on rank 1"):
            forward_backward(model, *batch(0), *more, **words)
    forward_backward(model, *batch(0))
    torch.rand(1 + rank)
    with pytest.raises(ParallelError, match="state of the random generators"):
        forward_backward(model, *batch(0))


def without_history(rank: int, world_size: int, how: Plan | None, axis: str) -> None:
    model = build(how, **{axis: world_size})
    with pytest.raises((RuntimeError, PipelineError), match="does not require grad"):
        forward_backward(model, *batch(0), loss=lambda found: found.detach())


def test_a_loss_without_a_history_is_torchs_error():
    simulate(2)(without_history, None, "pp")
    simulate(1)(without_history, Plan(microbatches=4), "dp")


class Drawing(nn.Module):
    """Draws between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.p = 0.5

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(nn.functional.dropout(x, self.p))
        return x.square().mean()


@on_ranks(2, simulated=True)
def test_other_draws_between_blocks_are_seen():
    torch.manual_seed(3)
    model = Drawing()
    staged(model, {"pp": 2}, microbatches=2, stages="blocks.*")
    x = torch.ones(4, 4)
    forward_backward(model, x)
    model.p = 0.0
    with pytest.raises(PipelineError, match=r"stage [01], from block .* draws other"):
        forward_backward(model, x)
    forward_backward(model, x)  # what was learned was forgotten


class Noisy(nn.Linear):
    """Draws in its backward, when it is told to."""

    draws = False

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if found.requires_grad:
            found.register_hook(self.hook)
        return found

    def hook(self, gradient: Tensor) -> None:
        if self.draws:
            torch.rand(3)


@pytest.mark.parametrize("backward", [False, True])
@on_ranks(2, simulated=True)
def test_draws_of_a_model_that_drew_nothing_are_seen(backward: bool):
    torch.manual_seed(3)
    model = Drawing()
    model.blocks[0], model.p = Noisy(4, 4), 0.0
    staged(model, {"pp": 2}, microbatches=2, stages="blocks.*")
    x = torch.ones(4, 4)
    for _ in range(3):  # from the second on, nobody looks after each forward any more
        forward_backward(model, x)
    here = torch.get_rng_state()
    model.p, model.blocks[0].draws = 0.0 if backward else 0.5, backward  # type: ignore[assignment]
    with pytest.raises(PipelineError, match=r"stage [01], from block .* draws other"):
        forward_backward(model, x)
    assert torch.equal(torch.get_rng_state(), here)
    # What was learned was forgotten: from now on each forward begins where it has to.
    for _ in range(3):
        forward_backward(model, x)
    assert torch.equal(torch.get_rng_state(), here) == backward


class Counted(Decoder):
    """As models of Hugging Face: the mean over tokens of the part, or of the whole batch."""

    def forward(self, tokens: Tensor, targets: Tensor, num_items_in_batch: Any = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        total = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        valid = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return total / valid


def counted_in_the_batch(rank: int, world_size: int, plan: Plan, sizes: dict[str, int]) -> None:
    """Rows of unequal numbers of tokens, in parts of unequal numbers of rows."""
    tokens = torch.randint(16, (5, 6), generator=torch.Generator().manual_seed(0))
    targets = tokens.clone()
    for row in range(5):
        targets[row, : row + 1] = -100
    torch.manual_seed(3)
    plain = Counted(blocks=2).eval()
    expected = plain(tokens, targets)
    expected.backward()
    torch.manual_seed(3)
    model = Counted(blocks=2).eval()
    parallelize(model, make_mesh(device_type="cpu", **sizes), plan)
    items = (targets != -100).sum()
    for _ in range(2):
        model.zero_grad()
        found = forward_backward(model, tokens, targets, num_items_in_batch=items)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0)
        require_gradients(model, plain)
    mean = forward_backward(model, tokens, targets)  # of means of parts
    assert abs(mean - expected.detach()) > 1e-4


BY_TOKENS = [
    (Plan(microbatches=2), {"dp": 1}),
    (Plan(batch="dp:0", parameters={"*": "replicate"}, microbatches=2), {"dp": 2}),
    (STAGES, {"pp": 2}),
    (Plan(pipeline="zb-h1", microbatches=3), {"pp": 2}),
    (Plan(batch="dp:0", deterministic=Invariant(4)), {"dp": 2}),
]


@pytest.mark.parametrize(
    ("plan", "sizes"), BY_TOKENS, ids=["microbatches", "dp", "stages", "halves", "invariant"]
)
def test_losses_by_the_tokens_of_the_batch_add_up(plan: Plan, sizes: dict[str, int]):
    simulate(max(sizes.values()))(counted_in_the_batch, plan, sizes)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@on_ranks(2, simulated=True)
def test_hooks_that_would_not_be_called_are_refused(kind: str):
    model = build(pp=2)
    forward_backward(model, *batch(0))
    getattr(model.blocks[0].mlp.up.weight, kind)(lambda found: None)
    with pytest.raises(PipelineError, match="parameters have hooks: 'blocks"):
        forward_backward(model, *batch(0))


@on_ranks(2, simulated=True)
def test_hooks_see_the_sum_of_microbatches_where_shards_are_reduced_once():
    model = build(Plan(microbatches=2, zero=3), dp=2)
    plain = make()
    for one in (*model.parameters(), *plain.parameters()):
        one.register_hook(lambda found: found * 2)
    torch.manual_seed(0)
    accumulate(plain, 2, *batch(0))
    torch.manual_seed(0)
    forward_backward(model, *batch(0))
    require_gradients(model, plain)
