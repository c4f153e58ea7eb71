"""An error that depends on values is raised on every rank, whichever rank holds the values.

What only one rank refused would leave the others waiting in the next collective. Arguments that
torch refuses are refused as well where a shard has no elements to look at.
"""

import pytest
import torch
import torch.nn.functional as F
from on_mesh import on_mesh
from vescale_dtensor import Replicate, Shard, distribute_tensor

NAN = float("nan")
LAYOUTS = [[Shard(0), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(0)]]
# One wrong value in the first place: the last ranks hold none, or nothing at all.
CALLS = {
    "negative": (lambda x: torch.bincount(x), torch.tensor([-3, 1, 1, 0, 2])),
    "negative, weighted": (lambda x: torch.bincount(x, x.double()), torch.tensor([-1, 4])),
    "length": (lambda x: torch.bincount(x, minlength=-1), torch.tensor([1, 4])),
    "floats": (lambda x: torch.bincount(x), torch.tensor([1.0, 2.0])),
    "booleans": (lambda x: torch.bincount(x), torch.tensor([True, False])),
    "weights": (lambda x: torch.bincount(x, torch.ones(3)), torch.tensor([1, 4])),
    "not finite": (lambda x: torch.histc(x, 4), torch.tensor([NAN, 1, 2, 3, 4])),
    "integers": (lambda x: torch.histc(x, 4), torch.tensor([1, 2])),
    "no bins": (lambda x: torch.histc(x, 0), torch.tensor([1.0, 2.0])),
    "reversed": (lambda x: torch.histc(x, 4, 3, 1), torch.tensor([1.0, 2.0])),
    "bins": (lambda x: torch.histogram(x, 4), torch.tensor([NAN, 1, 2, 3, 4])),
    "cov": (lambda x: torch.cov(torch.ones(2, 3), fweights=x), torch.tensor([-1, 1, 1])),
}


@pytest.mark.parametrize("name", CALLS)
def test_refused_on_every_rank(name):
    call, values = CALLS[name]
    with pytest.raises((RuntimeError, NotImplementedError)):
        call(values)

    def run(mesh):
        for placements in LAYOUTS:
            x = distribute_tensor(values, mesh, placements)
            with pytest.raises((RuntimeError, NotImplementedError)):
                call(x)

    on_mesh((2, 2), run)


def test_a_negative_variance_is_refused_on_every_rank():
    x, variance = torch.ones(5, 2), torch.ones(5, 2)
    variance[0, 0] = -1

    def run(mesh):
        for placements in LAYOUTS:
            ours, v = (distribute_tensor(t, mesh, placements) for t in (x, variance))
            for given in ((ours, ours, v), (ours, ours, v[:, 0]), (x, x, v)):
                with pytest.raises(ValueError, match="negative"):
                    F.gaussian_nll_loss(*given)
            found = F.gaussian_nll_loss(ours, ours * 2, v.abs()).full_tensor()
            torch.testing.assert_close(found, F.gaussian_nll_loss(x, x * 2, variance.abs()))

    on_mesh((2, 2), run)


@pytest.mark.parametrize("values", [[0, 0, 0], [5, 0, 2, 2, 7], []])
def test_bincount_counts_what_torch_counts(values):
    values = torch.tensor(values, dtype=torch.int64)
    weights = torch.arange(len(values), dtype=torch.float32)
    expected = [torch.bincount(values), torch.bincount(values, minlength=9)]
    expected += [torch.bincount(values, weights)] if len(values) else []

    def run(mesh):
        for placements in LAYOUTS:
            x, w = (distribute_tensor(t, mesh, placements) for t in (values, weights))
            found = [torch.bincount(x), torch.bincount(x, minlength=9), torch.bincount(x, w)]
            for ours, wanted in zip(found, expected, strict=False):
                torch.testing.assert_close(ours.full_tensor(), wanted)

    on_mesh((2, 2), run)


@pytest.mark.parametrize("func", [F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout])
@pytest.mark.parametrize("ndim", [0, 1, 2, 3, 4, 5])
@pytest.mark.filterwarnings("ignore")
def test_dropout_that_draws_nothing_refuses_what_torch_refuses(func, ndim):
    values = torch.ones((5,) * ndim)
    refused = None
    try:
        func(values, 0.5, False)
    except (RuntimeError, ValueError) as problem:
        refused = type(problem)

    def run(mesh):
        x = distribute_tensor(values, mesh, [Shard(0) if ndim else Replicate()])
        for p, training in ((0.5, False), (0.0, True)):
            if refused is None:
                assert torch.equal(func(x, p, training).full_tensor(), values)
            else:
                with pytest.raises(refused):
                    func(x, p, training)

    on_mesh((4,), run)
