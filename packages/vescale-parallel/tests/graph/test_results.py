"""What a step returns is right and has no history; the norm of its gradients has eager mode's bits.

Views of parameters among the results; parameters themselves, which with ZeRO are stand-ins; and
groups of an optimizer in another order than the parameters of the model.
"""

import pytest
import torch
from graph_models import Net, batch
from torch import nn, optim
from vescale_comm import simulate
from vescale_dtensor import CaptureError
from vescale_parallel import Plan, graph, mesh, parallelize

VIEWS = {
    "transposed": lambda weight: weight.t(),
    "a row": lambda weight: weight[0],
    "detached": lambda weight: weight.detach(),
}


def built(zero, world_size):
    torch.manual_seed(0)
    return parallelize(Net(1), mesh(dp=world_size), Plan(batch="dp:0", zero=zero))


def whole(tensor):
    return getattr(tensor, "full_tensor", lambda: tensor)()


def returning(rank, world_size, zero):
    for name, view in VIEWS.items():
        model = built(zero, world_size)
        weight = model.blocks[0].up.weight

        def step(tokens, model=model, view=view):
            return model(tokens), view(model.blocks[0].up.weight)

        made = graph.train_step(model, step, batch(0))
        _, seen = made(batch(0))
        assert not seen.requires_grad, name
        assert torch.equal(whole(seen.detach()), view(whole(weight))), name
        model.zero_grad()
        before = view(whole(weight)).clone()
        _, seen = made.with_optimizer(optim.SGD(model.parameters(), 0.1))(batch(0))
        after = view(whole(weight))
        assert not torch.equal(after, before)
        # A view as ever; with ZeRO, one of values that were gathered before the update.
        assert torch.equal(whole(seen.detach()), before if zero else after), name


@pytest.mark.parametrize("zero", [0, 3])
def test_a_view_of_a_parameter(zero):
    simulate(2).run(returning, zero)


def returning_itself(rank, world_size):
    for zero in range(4):
        model = built(zero, world_size)

        def step(tokens, model=model):
            return model(tokens), model.head.weight

        if not zero:
            _, seen = graph.train_step(model, step, batch(0))(batch(0))
            assert seen is model.head.weight
            continue
        with pytest.raises(CaptureError, match=r"returns the parameter 'head\.weight' itself"):
            graph.train_step(model, step, batch(0))


def test_a_parameter_itself_is_returned_or_refused():
    simulate(2).run(returning_itself)


def grouped(model):
    """An optimizer whose groups have the parameters in another order than the model."""
    wide = [one for one in model.parameters() if one.ndim > 1]
    thin = [one for one in model.parameters() if one.ndim < 2]
    return optim.AdamW([{"params": thin, "weight_decay": 0.0}, {"params": wide}], 0.02)


def clipped(rank, world_size, zero):
    model, eager = (built(zero, world_size) for _ in range(2))
    first, second = grouped(model), grouped(eager)
    step = graph.train_step(model, model, batch(0)).with_optimizer(first, max_norm=0.3)
    for at in range(8):
        torch.manual_seed(at)
        _, norm = step(batch(at))
        torch.manual_seed(at)
        second.zero_grad()
        eager(batch(at)).backward()
        expected = nn.utils.clip_grad_norm_(eager.parameters(), 0.3)
        second.step()
        assert torch.equal(whole(norm), whole(expected)), at
        for one, two in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(whole(one), whole(two)), at


@pytest.mark.parametrize("zero", [0, 3])
def test_the_norm_of_several_groups(zero):
    simulate(2).run(clipped, zero)
