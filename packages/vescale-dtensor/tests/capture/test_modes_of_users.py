"""Modes of the user's see every call, and functions of torch that were replaced are refused."""

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from capture_guards import rows, spread
from torch.overrides import TorchFunctionMode
from vescale_comm import simulate
from vescale_comm.testing import on_ranks


class Doubling(TorchFunctionMode):
    """Doubles what one function gives for DTensors, and for nothing else."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        wrapped = bool(args) and isinstance(args[0], vd.DTensor)
        return result * 2 if wrapped and func is torch.relu else result


@on_ranks(2, simulated=True)
def test_a_mode_of_the_users_sees_every_call():
    captured = vd.capture(lambda x: torch.relu(x) * 3)
    expected = rows().relu() * 3
    for factor in (1, 1, 2, 2, 1):
        replays = captured.replays
        if factor == 2:
            with Doubling():
                found = captured(spread(rows()))
        else:
            found = captured(spread(rows()))
        assert torch.equal(found.full_tensor(), expected * factor)
    assert captured.replays == replays + 1


@on_ranks(2, simulated=True)
def test_a_default_device_is_no_such_mode():
    captured = vd.capture(lambda x: x * torch.ones(4))
    for _ in range(3):
        with torch.device("cpu"):
            captured(spread(rows()))
    assert captured.replays == 2


def test_a_replaced_function_of_torch_is_refused(monkeypatch):
    original = F.softmax
    monkeypatch.setattr(F, "softmax", lambda *args, **kwargs: original(*args, **kwargs) * 2)

    def function(rank, world_size):
        with pytest.raises(vd.CaptureError, match="softmax has been replaced"):
            vd.capture(torch.nn.Softmax(dim=1))(spread(rows()))

    simulate(2)(function)
