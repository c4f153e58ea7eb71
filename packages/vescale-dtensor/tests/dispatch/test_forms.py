"""What the template makes of a call gives what the slow path gives, whatever its arguments are."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from vescale_comm import simulate
from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from vescale_dtensor._fast_path.cache import GRAD_IDLE, GRAD_RECORDED
from vescale_dtensor._fast_path.forms import Form, _factory

X = torch.arange(32.0).reshape(4, 8) / 7 - 2
CALLS = {
    "one": lambda x, y, w: x.relu(),
    "two": lambda x, y, w: x + y,
    "three": lambda x, y, w: torch.addcmul(x, y, y),
    "two and None": lambda x, y, w: F.linear(x, w, None),
    "two and a value": lambda x, y, w: torch.lerp(x, y, 0.5),
    "two and a named value": lambda x, y, w: torch.add(x, y, alpha=2.0),
    "one and values": lambda x, y, w: torch.softmax(x, 1),
    "one and a named value": lambda x, y, w: x.sum(1, keepdim=True),
    "by name": lambda x, y, w: torch.mul(input=x, other=y),
    "one, and others by name": lambda x, y, w: F.rms_norm(x, (8,), weight=w[0]),
    "a value between": lambda x, y, w: torch.where(x > 0, 2.0, y),
    "a list": lambda x, y, w: torch.cat([x, y], 1),
    "a tuple": lambda x, y, w: torch.stack((x, y), 1),
    "a plain tensor": lambda x, y, w: x * torch.full((8,), 3.0),
    "the operand itself": lambda x, y, w: x.contiguous(),
    "a slice": lambda x, y, w: x[:, 2:4],
    "a view": lambda x, y, w: x.view(-1, 2, 4),
    "a view as another": lambda x, y, w: x.transpose(0, 1).expand_as(y.t()),
    "another dtype": lambda x, y, w: x.to(torch.float64),
    "redistributed": lambda x, y, w: x @ w.redistribute(placements=[Shard(0)]),
    "written": lambda x, y, w: (x * 1).mul_(2.0).add_(y, alpha=0.5),
    "under autocast": lambda x, y, w: _autocast(lambda: x @ w),
}


def _autocast(call):
    with torch.autocast("cpu", torch.bfloat16):
        return call()


def _described(result):
    meta = result._spec.tensor_meta
    return (
        (result.placements, tuple(meta.shape), tuple(meta.stride), meta.dtype),
        (result._lineage, result.requires_grad, result._view_copy_of is not None),
        result.to_local().tolist(),
    )


@pytest.mark.parametrize("grad", [False, True])
def test_a_compiled_call_gives_what_the_slow_path_gives(grad):
    def run(rank, world_size):
        mesh = init_device_mesh("cpu", (2,))
        x, y = (distribute_tensor(t, mesh, [Shard(0)]).requires_grad_(grad) for t in (X, X * 2))
        w = distribute_tensor(torch.eye(8) * 3, mesh, [Replicate()]).requires_grad_(grad)
        for name, call in CALLS.items():
            if grad and name == "written":
                continue  # recorded writes are never compiled
            for _ in range(4):  # plain operands are compared at first
                known = call(x, y, w)
            with vd.explain():  # nothing is compiled while somebody looks
                slow = call(x, y, w)
            assert _described(known) == _described(slow), name

    simulate(2)(run)


def test_tracebacks_show_the_source_of_a_compiled_call():
    def run(rank, world_size):
        x = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Replicate()])
        torch.hypot(x, x)
        torch.hypot(x, x.requires_grad_())

    simulate(2)(run)
    for table, part in ((GRAD_IDLE, "t0._local_tensor"), (GRAD_RECORDED, "recorded_local(t0, m0)")):
        (call,) = [call for key, call in table.items() if key[0] is torch.hypot][:1]
        assert part in inspect.getsource(call)


def test_each_source_has_a_name_of_its_own():
    named = [((), False), ((), True), (("other",), True), (("weight",), True)]
    forms = [Form("t", *each, frozenset({"makes"})) for each in named]
    assert len({_factory(form).__code__.co_filename for form in forms}) == len(forms)
