"""What torch refuses of a whole tensor is refused of a sharded one, and not answered otherwise.

A rule that writes an operation out in other ones, or translates indices to those of a shard, could
take dtypes, names and numbers that torch does not.
"""

import pytest
import torch
from on_mesh import on_mesh
from vescale_dtensor import Replicate, Shard, distribute_tensor

X = torch.arange(12.0).reshape(4, 3)
LAYOUTS = [[Replicate(), Replicate()], [Shard(0), Replicate()], [Shard(0), Shard(1)]]
SHORT = torch.tensor([0, 1], dtype=torch.int16)
CALLS = {
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


@pytest.mark.parametrize("name", CALLS)
def test_refused(name):
    call, errors = CALLS[name], (RuntimeError, TypeError, IndexError, ValueError)
    with pytest.raises(errors):
        call(X)

    def run(mesh):
        for placements in LAYOUTS:
            with pytest.raises(errors):
                call(distribute_tensor(X, mesh, placements))

    on_mesh((2, 2), run)


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
