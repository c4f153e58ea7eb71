"""A parallelized model is captured from its first call on, in `simulate` too: bit for bit eager."""

import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import nn
from vescale_comm import simulate
from vescale_comm.testing import run
from vescale_parallel import Plan, mesh, parallelize

STEPS = 10
PLAN = Plan(parameters={"up.weight": "tp:0", "down.weight": "tp:1", "*": "replicate"})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(F.dropout(F.gelu(self.up(x)), 0.1))


def trained(wrap):
    torch.manual_seed(0)
    model = Net()
    parallelize(model, mesh(dp=2, tp=2, device_type="cpu"), PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = wrap(model)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = forward(torch.randn(4, 4)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach().full_tensor())
    return [*losses, *(p.detach().full_tensor() for p in model.parameters())]


def compared(rank, world_size):
    made = []

    def captured(model):
        made.append(vd.capture(model))
        return made[-1]

    assert all(map(torch.equal, trained(captured), trained(lambda model: model)))
    assert len(made[0].programs) == 1


def test_captured_from_the_first_call():
    run(compared, 4)


def test_captured_under_simulate():
    simulate(4).run(compared)
