"""Second derivatives of reductions and scans are those of one device, and no rank waits in vain.

Also where a rank's part is empty or zero, of which torch takes short cuts in backward.
"""

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import RaggedShard, Shard

INF = float("inf")
BOTH = torch.tensor([[1.0, -2.0], [3.0, 0.5], [-1.0, 2.5]], dtype=torch.float64)
ROWS = {
    "numbers": BOTH,
    "a column of zeros": BOTH * torch.tensor([0.0, 1.0]),
    "rows of zeros": BOTH * torch.tensor([[0.0], [0.0], [1.0]]),
}
LAYOUTS = {
    "last": Shard(0),
    "first": RaggedShard((0,), (0, 1, 2, 0)),
    "middle": RaggedShard((0,), (2, 0, 0, 1)),
    "one": RaggedShard((0,), (0, 3, 0, 0)),
    "columns": Shard(1),
}
ORDERS = (1, 2, 3, 2.5, 1.5, 0.5, -1, -2, INF, -INF)


def named(names, pick=lambda found: found):
    return {n: lambda x, dim, n=n: pick(getattr(torch, n)(x, dim=dim)) for n in names.split()}


FUNCTIONS = {
    **named("sum mean prod var std nansum logsumexp amax amin softmax log_softmax"),
    **named("cumsum cumprod logcumsumexp diff"),
    **named("cummax cummin max min median nanmedian sort", lambda found: found[0]),
    **named("aminmax var_mean std_mean", torch.stack),
    "softmin": F.softmin,
    "topk": lambda x, dim: x.topk(2, dim)[0],
    "normalize": lambda x, dim: F.normalize(x, dim=dim),
    "cosine_similarity": lambda x, dim: F.cosine_similarity(x, x * x + 1, dim=dim),
    "max of all": lambda x, dim: x.max(),
    "prod of all": lambda x, dim: x.prod(),
    **{
        f"norm {order}": lambda x, dim, order=order: torch.linalg.vector_norm(x, order, dim)
        for order in ORDERS
    },
    **{
        f"norm {order} of all": lambda x, dim, order=order: torch.linalg.vector_norm(x, order)
        for order in (2, 1.5, INF)
    },
    "norm of a sum of norms": lambda x, dim: x.norm(2, dim).sum() * x.norm(),
}


def derivatives(function, x):
    """Value, first and second derivative of the cube of a function of the rows, and of them."""
    value = function(x, 0)
    (first,) = torch.autograd.grad((value**3).sum(), x, create_graph=True)
    weights = torch.arange(1, 1 + first.numel(), dtype=first.dtype).view(first.shape)
    (second,) = torch.autograd.grad((first * weights).sum(), x)
    return value, first, second


def beside_one_device(rank, world_size, layout):
    mesh, faults = device_mesh((world_size,), ("tp",)), []
    for name, function in FUNCTIONS.items():
        for which, rows in ROWS.items():
            expected = derivatives(function, rows.clone().requires_grad_())
            x = vd.distribute_tensor(rows, mesh, [LAYOUTS[layout]]).requires_grad_()
            found = [each.full_tensor() for each in derivatives(function, x)]
            for order, (one, other) in enumerate(zip(expected, found, strict=True)):
                if not torch.allclose(other, one, rtol=1e-9, atol=1e-9, equal_nan=True):
                    told = f"{other.tolist()} for {one.tolist()}"
                    faults.append(f"{name} of {which}, derivative {order}: {told}")
    return faults


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore:.*has no rule")
def test_second_derivatives(layout):
    for faults in simulate(4).run(beside_one_device, layout):
        assert not faults, "\n".join(faults)


KINDS = {
    "complex64": (torch.complex64, {}),
    "bfloat16": (torch.bfloat16, {}),
    "half in float": (torch.float16, {"dtype": torch.float32}),
}


def norms_of_other_kinds(rank, world_size):
    mesh = device_mesh((world_size,), ("tp",))
    for kind, how in KINDS.values():
        for order in (1, 2, 3, 0.5):
            for keepdim in (False, True):
                for rows in ROWS.values():
                    x = rows.to(kind).requires_grad_()
                    d = vd.distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()
                    for each in (x, d):
                        norm = torch.linalg.vector_norm(each, order, 0, keepdim, **how)
                        norm.square().sum().backward()
                    close = {"rtol": 2e-2, "atol": 2e-2} if kind is torch.bfloat16 else {}
                    torch.testing.assert_close(d.grad.full_tensor(), x.grad, **close)


def test_norms_of_other_kinds():
    simulate(2).run(norms_of_other_kinds)


def mixed_derivatives(function, x, weights, move):
    """The second derivatives by both operands, which come from another layout, of a product."""
    value = function(move(x), 0)
    total = (value * move(weights[..., : value.shape[-1]])).sum()
    (first,) = torch.autograd.grad(total, [x], create_graph=True)
    if not (first.to_local() if isinstance(first, vd.DTensor) else first).requires_grad:
        return [first]
    return torch.autograd.grad(first.sum(), [x, weights], allow_unused=True)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if " of " not in name])
@pytest.mark.filterwarnings("ignore:.*has no rule")
def test_gradients_depend_on_the_same_on_ranks_without_columns(name):
    weights = torch.tensor([0.5, -1.5], dtype=torch.float64)
    leaves = [one.clone().requires_grad_() for one in (BOTH, weights)]
    expected = mixed_derivatives(FUNCTIONS[name], *leaves, lambda x: x * 1)

    def program(rank, world_size):
        mesh = device_mesh((world_size,))
        x, w = [
            vd.distribute_tensor(one, mesh, [vd.Replicate()]).requires_grad_()
            for one in (BOTH, weights)
        ]
        found = mixed_derivatives(
            FUNCTIONS[name], x, w, lambda x: x.redistribute(placements=[Shard(x.ndim - 1)])
        )
        return [None if one is None else one.full_tensor() for one in found]

    for found in simulate(4).run(program):
        for one, other in zip(found, expected, strict=True):
            # A derivative that is nothing on one device may be zeros.
            if other is not None or one is not None:
                other = torch.zeros_like(one) if other is None else other
                torch.testing.assert_close(torch.zeros_like(other) if one is None else one, other)
