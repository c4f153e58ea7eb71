"""Every optimizer of torch, captured in each of its implementations, trains as in eager mode.

Those that count their steps in Python are one step of the program; losses, parameters and states
are compared after every step, bit for bit.
"""

import captured_training
import pytest
import torch
from vescale_comm.testing import on_ranks, run

# They read a step count, or a value, into Python numbers: called again at each replay.
LIVE = {
    *("ASGD foreach", "ASGD for-loop", "Adafactor for-loop"),
    *("Adafactor foreach", "Adagrad foreach", "Adagrad for-loop", "Adam foreach", "Adam for-loop"),
    *("AdamW foreach", "AdamW for-loop", "Adamax foreach", "Adamax for-loop"),
    *("NAdam foreach", "NAdam for-loop", "RAdam foreach", "RAdam for-loop"),
}


def a_scheduler_of_each_step(wrap):
    model = captured_training.network()
    optimizer = captured_training.adam(model, foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    step = wrap(lambda x: captured_training.plain_step(model, optimizer, x))
    return captured_training.Training(model, optimizer, step, after=scheduler.step)


def verdict(rank, world_size, name):
    function = captured_training.trains(captured_training.with_optimizer(name))
    # What the optimizer makes at its first step is there before the second.
    assert 1 <= len(function.programs) <= 2
    assert function._misses.replays >= captured_training.STEPS - 2
    return "live" if function.programs[0].live else "recorded"


@pytest.mark.parametrize("name", list(captured_training.OPTIMIZERS))
def test_optimizers_inside(name):
    assert run(verdict, 2, name) == ["live" if name in LIVE else "recorded"] * 2


@on_ranks(2)
def test_a_rate_of_each_step_is_right_and_named():
    with pytest.warns(UserWarning, match=r"another value of .*param_groups\[0\]\['lr'\]"):
        captured_training.trains(a_scheduler_of_each_step, steps=10)
