"""Raw communication refuses DTensors on every rank, whichever of torch's names it is called by.

It would send this rank's piece, or hand out what differs from rank to rank as if it were the same.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients
import vescale_comm
from one_device import Place
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import DTensorError, Replicate, Shard

WHOLE = torch.arange(24.0).reshape(6, 4)


def plain(count=4):
    return [torch.zeros(6, 4) for _ in range(count)]


def after(rank):
    return (rank + 1) % 4


def on_dp(x):
    return x.device_mesh.get_group("dp")


CALLS = {
    "all_reduce": lambda x, r: dist.all_reduce(x),
    "broadcast": lambda x, r: dist.broadcast(x, 0),
    "reduce": lambda x, r: dist.reduce(x, 0),
    "all_gather": lambda x, r: dist.all_gather(plain(), x),
    "all_gather_into_tensor": lambda x, r: dist.all_gather_into_tensor(torch.zeros(24, 4), x),
    "all_gather_into_tensor, into": lambda x, r: dist.all_gather_into_tensor(x, WHOLE),
    "gather": lambda x, r: dist.gather(x, plain() if r == 0 else None),
    "scatter": lambda x, r: dist.scatter(x, plain() if r == 0 else None),
    "reduce_scatter": lambda x, r: dist.reduce_scatter(x, plain()),
    "reduce_scatter of a list": lambda x, r: dist.reduce_scatter(WHOLE.clone(), [x] * 4),
    "reduce_scatter_tensor": lambda x, r: dist.reduce_scatter_tensor(x, WHOLE),
    "all_to_all": lambda x, r: dist.all_to_all(plain(), [x] * 4),
    "all_to_all_single": lambda x, r: dist.all_to_all_single(torch.zeros(6, 4), x),
    "send": lambda x, r: dist.send(x, after(r)),
    "recv": lambda x, r: dist.recv(x, after(r)),
    "isend": lambda x, r: dist.isend(x, after(r)),
    "irecv": lambda x, r: dist.irecv(x, after(r)),
    "P2POp": lambda x, r: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, after(r))]),
    "all_reduce_coalesced": lambda x, r: dist.all_reduce_coalesced([x]),
    "all_gather_coalesced": lambda x, r: dist.all_gather_coalesced([plain()], [x]),
    # Objects with a DTensor inside are pickled.
    "all_gather_object": lambda x, r: dist.all_gather_object([None] * 4, {"a": [x]}),
    "gather_object": lambda x, r: dist.gather_object((x,), [None] * 4 if r == 0 else None),
    "broadcast_object_list": lambda x, r: dist.broadcast_object_list([x], src=r),
    "scatter_object_list": lambda x, r: dist.scatter_object_list([None], [x] * 4, src=r),
    "send_object_list": lambda x, r: dist.send_object_list([x], after(r)),
    # Process groups, and the ops behind the functional collectives.
    "group.allreduce": lambda x, r: on_dp(x).allreduce([x]).wait(),
    "group.broadcast": lambda x, r: on_dp(x).broadcast(x, 0).wait(),
    "group.allgather": lambda x, r: on_dp(x).allgather([plain(2)], [x]).wait(),
    "group.send": lambda x, r: on_dp(x).send([x], 1, 0).wait(),
    "funcol all_reduce": lambda x, r: functional.all_reduce(x, "sum", on_dp(x)),
    "funcol all_gather": lambda x, r: functional.all_gather_tensor(x, 0, on_dp(x)),
    "funcol reduce_scatter": lambda x, r: functional.reduce_scatter_tensor(x, "sum", 0, on_dp(x)),
    "funcol all_to_all": lambda x, r: functional.all_to_all_single(x, None, None, on_dp(x)),
    "funcol broadcast": lambda x, r: functional.broadcast(x, 0, on_dp(x)),
    "funcol coalesced": lambda x, r: functional.all_reduce_coalesced([x], "sum", on_dp(x)),
    "funcol, autograd": lambda x, r: functional.all_gather_tensor_autograd(x, 0, on_dp(x)),
    "registered op": lambda x, r: torch.ops._c10d_functional.all_reduce.default(
        x, "sum", on_dp(x).group_name
    ),
    "dist.nn all_reduce": lambda x, r: with_gradients.all_reduce(x),
    "dist.nn all_gather": lambda x, r: with_gradients.all_gather(x),
    "dist.nn broadcast": lambda x, r: with_gradients.broadcast(x, 0),
}
LAYOUTS = ((Shard(0), Shard(1)), (Replicate(), Replicate()))
# gloo copies what is in a list before it communicates.
WORDS = {"reduce_scatter of a list": "aten.*reached from.*to_local"}
# C++ looks into these lists without asking, and then finds no memory behind the wrappers.
IN_CPP = {
    "all_gather, into": lambda x, r: dist.all_gather([x] * 4, WHOLE),
    "scatter of a list": lambda x, r: dist.scatter(WHOLE.clone(), [x] * 4, src=r),
}


@pytest.mark.parametrize("name", CALLS)
@on_ranks(4)
def test_refused(rank, world_size, name):
    for layout in LAYOUTS:
        x = Place(device_mesh((2, 2), ("dp", "tp")))(WHOLE, *layout)
        words = WORDS.get(name, "vescale_ckpt" if "object" in name else "global already.*to_local")
        with warnings.catch_warnings(action="ignore"), pytest.raises(DTensorError, match=words):
            CALLS[name](x, rank)


@pytest.mark.parametrize("name", IN_CPP)
@on_ranks(4)
def test_refused_by_cpp(rank, world_size, name):
    for layout in LAYOUTS:
        x = Place(device_mesh((2, 2), ("dp", "tp")))(WHOLE, *layout)
        with pytest.raises((RuntimeError, SystemError)):
            IN_CPP[name](x, rank)


@on_ranks(4)
def test_our_own_collectives_refuse_them_too():
    x = Place(device_mesh((2, 2), ("dp", "tp")))(WHOLE)
    with pytest.raises(vescale_comm.CommArgumentError, match="to_local"):
        vescale_comm.all_reduce(x, vescale_comm.group_of(x.device_mesh, (0,)))
