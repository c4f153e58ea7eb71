"""What torch refuses of a whole tensor is refused of a sharded one, on every rank.

Also an error that depends on values, whichever rank holds the values; and an index that is out of
range, whichever dims are sharded. Ranks translate global indices to places in their shards; one
that no rank has a place for must not become a zero, or a write that is dropped. A rank without
elements of the result looks at no index, so shards here are uneven and not empty, and indices of
single elements are wrong in all places.
"""

from functools import partial
from itertools import product

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


def require_refused(errors, call, whole, layouts):
    """One device raises, and so does every rank, however the tensor is sharded."""
    with pytest.raises(errors):
        call(whole)

    def run(mesh):
        for placements in layouts:
            with pytest.raises(errors):
                call(distribute_tensor(whole, mesh, placements))

    on_mesh((2, 2), run)


@pytest.mark.parametrize("name", CALLS)
def test_refused_on_every_rank(name):
    require_refused((RuntimeError, NotImplementedError), *CALLS[name], LAYOUTS)


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


X = torch.arange(12.0).reshape(4, 3)
OF_MATRICES = [[Replicate(), Replicate()], [Shard(0), Replicate()], [Shard(0), Shard(1)]]
SHORT = torch.tensor([0, 1], dtype=torch.int16)
REFUSED = {
    "take a mask": lambda x: torch.take(x, torch.tensor([True, False])),
    "take": lambda x: torch.take(x, SHORT.int()),
    "index_select": lambda x: torch.index_select(x, 0, SHORT),
    "index_add": lambda x: torch.index_add(x, 0, SHORT, x[:2]),
    "index_copy": lambda x: torch.index_copy(x, 0, SHORT.int(), x[:2]),
    "index_fill": lambda x: torch.index_fill(x, 0, SHORT.int(), 1.0),
    "scatter": lambda x: torch.scatter(x, 0, SHORT[:, None], 1.0),
    "integers as weights": lambda x: torch.cov(x, aweights=torch.ones(3, dtype=torch.int64)),
    "numbers as counts": lambda x: torch.cov(x, fweights=torch.ones(3)),
    "norm of a name": lambda x: torch.norm(x, p="2"),
    "norm of another": lambda x: x.norm("inf"),
    "dims": lambda x: torch.linalg.tensorsolve(x[:3].unsqueeze(1), x[:3, :1], dims=[5]),
    "sizes": lambda x: x.unflatten(0, (2.0, 2.0)),
    "a float to expand to": lambda x: x[:1].expand(2.0, 3),
    "keepdim": lambda x: x.sum(0, 1),
    "descending": lambda x: torch.sort(x, 0, 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    errors = (RuntimeError, TypeError, IndexError, ValueError)
    require_refused(errors, REFUSED[name], X, OF_MATRICES)


def test_tensorsolve_moves_dims_as_torch_does():
    matrix = torch.randn(2, 3, 2, 3, generator=torch.Generator().manual_seed(1))
    right = torch.ones(2, 3)
    expected = torch.linalg.tensorsolve(matrix, right, dims=(1, 2))

    def run(mesh):
        ours = distribute_tensor(matrix, mesh, [Shard(1)])
        found = torch.linalg.tensorsolve(ours, right, dims=(1, 2)).full_tensor()
        torch.testing.assert_close(found, expected)

    on_mesh((4,), run)


def test_cond_of_complex_matrices_is_real_where_a_shard_is_empty():
    matrices = torch.randn(2, 3, 3, dtype=torch.complex64)
    dense = matrices.clone().requires_grad_()
    expected = torch.linalg.cond(dense)
    expected.sum().backward()

    def run(mesh):
        ours = distribute_tensor(matrices, mesh, [Shard(0)]).requires_grad_()
        found = torch.linalg.cond(ours)
        assert found.dtype == found.to_local().dtype == torch.float32
        found.sum().backward()
        torch.testing.assert_close(found.full_tensor(), expected)
        torch.testing.assert_close(ours.grad.full_tensor(), dense.grad)

    on_mesh((4,), run)


TABLE = torch.arange(49.0).reshape(7, 7) + 1
ROW, COLUMN = torch.ones(1, 7), torch.ones(7, 1)
OF_TABLES = list(product((Replicate(), Shard(0), Shard(1)), repeat=2))
OUT_OF_RANGE = {"too large": 9, "too small": -9}


def indices(bad, *others):
    return torch.tensor([*others, bad])


INDEXED = {
    "x[i]": lambda x, bad: x[indices(bad, 0)],
    "x[i, j]": lambda x, bad: x[indices(bad, 0), indices(1, 2)],
    "x[j, i]": lambda x, bad: x[indices(1, 2), indices(bad, 0)],
    "x[:, i]": lambda x, bad: x[:, indices(bad, 0)],
    "index_select": lambda x, bad: torch.index_select(x, 1, indices(bad, 0)),
    "gather": lambda x, bad: torch.gather(x, 0, torch.full((1, 7), bad)),
    "index_add": lambda x, bad: torch.index_add(x, 0, indices(bad), ROW),
    "index_copy": lambda x, bad: torch.index_copy(x, 1, indices(bad), COLUMN),
    "index_fill": lambda x, bad: torch.index_fill(x, 1, indices(bad), 2.0),
    "scatter": lambda x, bad: torch.scatter(x, 0, torch.full((1, 7), bad), 2.0),
    "index_put": lambda x, bad: x.index_put((indices(bad), indices(0)), torch.tensor(2.0)),
    "accumulate": lambda x, bad: x.index_put((indices(0), indices(bad)), torch.ones(1), True),
    "embedding": lambda x, bad: F.embedding(indices(bad, 0), x),
    "embedding_bag": lambda x, bad: F.embedding_bag(indices(bad, 0)[None], x, mode="sum"),
    "cross_entropy": lambda x, bad: F.cross_entropy(x, torch.full((7,), bad)),
    "nll_loss": lambda x, bad: F.nll_loss(x, torch.full((7,), bad)),
}


@pytest.mark.parametrize("which", OUT_OF_RANGE)
@pytest.mark.parametrize("name", INDEXED)
def test_an_index_out_of_range_is_refused_on_every_rank(name, which):
    call = partial(INDEXED[name], bad=OUT_OF_RANGE[which])
    require_refused((IndexError, RuntimeError), call, TABLE, OF_TABLES)


@pytest.mark.parametrize("index", [-9, -1, 6, 9])
def test_take_along_dim_takes_the_indices_that_torch_takes(index):
    indices = torch.full((7, 1), index)
    expected = torch.take_along_dim(TABLE, indices, 1)

    def run(mesh):
        for placements in OF_TABLES:
            x = distribute_tensor(TABLE, mesh, placements)
            assert torch.equal(torch.take_along_dim(x, indices, 1).full_tensor(), expected)

    on_mesh((2, 2), run)


def test_a_dim_without_elements_has_no_index():
    def run(mesh):
        x = distribute_tensor(torch.zeros(0, 4), mesh, [Shard(1)])
        with pytest.raises(IndexError):
            x[torch.tensor([0]), torch.tensor([1])]

    on_mesh((4,), run)
