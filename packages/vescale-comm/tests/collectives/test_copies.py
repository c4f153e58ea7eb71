"""Results come in their final layout: what is copied on the way is what the docstrings say.

Counted with a mode that sees every operator: an allocation for what is received, torch's own
collective, and, along an inner dim, where the wire takes one member after the other, one
concatenation. What is small two members send each other, over gloo: each copies its own part of a
gather, and adds up a sum by itself.
"""

import torch
import torch.distributed as dist
from vescale_comm import all_gather, all_reduce, gather_pieces, reduce_scatter
from vescale_comm.testing import on_ranks
from vescale_comm_seen import Seen

gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
x, deep = torch.ones(4, 6), torch.ones(1, 4, 6)
GATHER, SCATTER, SCATTER_LIST = "gather", "scatter", "scatter of a list"
SUM = ("empty_like", "alltoall_base", "add")
PARTS = ("new_empty", "select", "copy", "select", "alltoall_base")
MIRROR = ("lt", "bitwise_xor", "where")
large = torch.ones(1024, 1025)

# name: (call, operators)
CALLS = {
    "all_reduce": (lambda r: all_reduce(x), SUM),
    "all_reduce, avg": (lambda r: all_reduce(x, op="avg"), [*SUM, "div"]),
    "all_reduce, large": (lambda r: all_reduce(large), ["clone", "allreduce"]),
    "all_reduce, max": (
        lambda r: all_reduce(x, op="max"),
        # As integers, among which a NaN has a place.
        ["clone", "isnan", "scalar_tensor", "where", *MIRROR, "allreduce", *MIRROR],
    ),
    "all_gather": (lambda r: all_gather(x), PARTS),
    "all_gather after 1": (lambda r: all_gather(deep, dim=1), PARTS),
    "all_gather inside": (lambda r: all_gather(x, dim=1), [*PARTS, "cat"]),
    "all_gather, large": (lambda r: all_gather(large), ["new_empty", GATHER]),
    "gather_pieces": (lambda r: gather_pieces(x, shapes=[(4, 6)] * 2), PARTS),
    "reduce_scatter": (lambda r: reduce_scatter(x), ["new_empty", SCATTER]),
    "reduce_scatter, avg": (lambda r: reduce_scatter(x, op="avg"), ["new_empty", SCATTER, "div"]),
    "reduce_scatter after 1": (lambda r: reduce_scatter(deep, dim=1), ["new_empty", SCATTER]),
    "reduce_scatter inside": (lambda r: reduce_scatter(x, dim=-1), ["cat", "new_empty", SCATTER]),
    "reduce_scatter uneven": (
        lambda r: reduce_scatter(x, sizes=[1, 3]),
        ["new_empty", SCATTER_LIST],
    ),
}


def of_torch(call):
    with Seen() as seen:
        call()
    return seen.names


@on_ranks(2)
def test_what_is_copied_is_what_is_stated(rank, world_size):
    # A backend may copy what it receives: that is its own affair.
    torch_own = {
        GATHER: of_torch(lambda: gather_single(torch.empty(8, 6), x))[1:],
        SCATTER: of_torch(lambda: scatter_single(torch.empty(2, 6), x))[1:],
        SCATTER_LIST: of_torch(lambda: dist.reduce_scatter(torch.empty(2, 6), [x[:2], x[2:]]))[1:],
    }
    for name, (call, stated) in CALLS.items():
        expected = [each for want in stated for each in torch_own.get(want, [want])]
        call(rank)  # the first one of a process tries whether the dtype can be copied
        for _ in range(3):  # first the long road, then the short one
            with Seen() as seen:
                call(rank)
            assert seen.names == expected, name
