"""What the tests of guards share: a captured function whose every call is compared with eager."""

import torch
import vescale_dtensor as vd
from torch import nn
from torch.utils._pytree import tree_flatten
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import Shard


class Recorded:
    """A captured function, every call of which is compared with the function itself."""

    def __init__(self, function):
        self.function, self.captured = function, vd.capture(function)
        # However many kinds a test has: guards are tested here, and not what a recording costs.
        self.captured._misses.may_record = lambda kind: True

    def __call__(self, *args, **kwargs):
        """A call of a new kind: recorded now, and replayed when it comes again."""
        known = len(self.captured.programs)
        self.again(*args, **kwargs)
        assert len(self.captured.programs) == known + 1
        self.again(*args, **kwargs)
        assert len(self.captured.programs) == known + 1

    def again(self, *args, **kwargs):
        state = torch.get_rng_state()
        expected = self.function(*args, **kwargs)
        torch.set_rng_state(state)
        same(self.captured(*args, **kwargs), expected)


def same(one, two):
    ones, twos = tree_flatten(one)[0], tree_flatten(two)[0]
    for x, y in zip(ones, twos, strict=True):
        assert x.placements == y.placements
        assert x.dtype == y.dtype
        assert x.requires_grad == y.requires_grad
        assert torch.equal(x._local_tensor, y._local_tensor)


def line(name="dp"):
    return device_mesh((2,), (name,))


def spread(value, *placements, name="dp"):
    return vd.distribute_tensor(value, line(name), placements or [Shard(0)], src_data_rank=None)


def rows(count=5, columns=4, seed=0):
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))


def linear():
    torch.manual_seed(0)
    return vd.distribute_module(nn.Linear(4, 3), line())


def on_both(case):
    """Run a case on two ranks."""
    run(_on_a_rank, 2, case)


def _on_a_rank(rank, world_size, case):
    case()
