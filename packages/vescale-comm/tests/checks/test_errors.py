"""Arguments that do not fit are named on every rank, before anything is sent; so are timeouts."""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import vescale_comm as vc
from vescale_comm._torch.compat import set_group_timeout
from vescale_comm.testing import outcomes, run
from vescale_comm_worlds import refusals, waiting_in_vain
from vescale_comm_worlds import run as both_worlds

x = torch.zeros(4, 3)


def quantised(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will drop them
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


# Each is wrong on both ranks, and says so in these words.
BAD = {
    "dim": (lambda: vc.all_gather(x, dim=2), "all_gather: dim 2 is out of range for shape (4, 3)"),
    "scalar": (lambda: vc.all_gather(x.sum()), "a 0-dim tensor has none: reshape it to (1,)"),
    "sizes-length": (lambda: vc.all_gather(x, sizes=[4]), "sizes=(4,) has 1 entries"),
    "sizes-negative": (lambda: vc.all_gather(x, sizes=[5, -1]), "sizes=(5, -1) has a negative"),
    "sizes-own": (lambda: vc.all_gather(x, sizes=[3, 3]), "] is 3, but this rank (member"),
    "shapes-own": (lambda: vc.gather_pieces(x, shapes=[(3, 4)] * 2), "is (3, 4), but this rank"),
    "shapes-length": (lambda: vc.gather_pieces(x, shapes=[(4, 3)]), "shapes has 1 entries, but"),
    "not-divisible": (
        lambda: vc.reduce_scatter(x, dim=1),
        "extent 3 of dim 1 is not divisible by 2 members; say how to cut it with sizes=",
    ),
    "sizes-sum": (lambda: vc.reduce_scatter(x, sizes=[1, 2]), "sizes=(1, 2) sum to 3, but dim 0"),
    "pieces-count": (lambda: vc.all_to_all([x], shapes=[(4, 3)] * 2), "takes 2 pieces, one for"),
    "pieces-dtype": (
        lambda: vc.all_to_all([x, x.double()], shapes=[(4, 3)] * 2),
        "are of torch.float32 on cpu and of torch.float64 on cpu",
    ),
    "pieces-device": (
        lambda: vc.all_to_all([x, x.to("meta")], shapes=[(4, 3)] * 2),
        "all_to_all over ranks 0, 1: the tensor is on meta",
    ),
    "bucket-device": (
        lambda: vc.all_reduce_bucketed([x, x.to("meta")]),
        "all_reduce_bucketed over ranks 0, 1: the tensor is on meta, and the group",
    ),
    "bucket-number": (lambda: vc.all_reduce_bucketed([x, 1.0]), "takes a tensor, not float"),
    "output-device": (
        lambda: vc.all_gather_into_tensor(torch.empty(8, 3, device="meta"), x),
        "the output is torch.float32 (8, 3) on meta, and the result torch.float32 (8, 3) on cpu",
    ),
    "output-strides": (
        lambda: vc.reduce_scatter_tensor(torch.empty(3, 2).t(), x),
        "the output is not contiguous (shape (2, 3), strides (1, 2))",
    ),
    "pieces-own": (lambda: vc.all_to_all([x, x], shapes=[(1,)] * 2), "is (1,), but this rank"),
    "source": (lambda: vc.broadcast(x, source=2), "source=2 is not a member of ranks 0, 1"),
    "device": (lambda: vc.all_reduce(x.to("meta")), "the tensor is on meta, and the group"),
    "sparse": (lambda: vc.all_reduce(x.to_sparse()), "takes a dense tensor, not one of layout"),
    "number": (lambda: vc.all_reduce(1.0), "all_reduce takes a tensor, not float"),
    "group": (lambda: vc.all_reduce(x, "dp"), "not a group: 'dp'"),
    "uint4": (
        lambda: vc.broadcast(torch.zeros(4, dtype=torch.uint8).view(torch.uint4)),
        "torch does not copy tensors of torch.uint4",
    ),
    "quantised": (lambda: vc.all_gather(quantised(x)), "not copy tensors of torch.qint8"),
    "fractions": (lambda: vc.reduce_scatter(x, sizes=[2.5, 1.5]), "takes whole numbers, not ["),
    "words": (lambda: vc.gather_pieces(x, shapes=["ab", (4, 3)]), "takes whole numbers, not 'ab'"),
    "negative": (lambda: vc.gather_pieces(x, shapes=[(-1,)] * 2), "shapes has (-1,), with a"),
    "dim-fraction": (lambda: vc.all_gather(x, dim=1.5), "dim 1.5 is out of range"),
    "source-fraction": (lambda: vc.broadcast(x, source=0.5), "source=0.5 is not a member"),
    "into": (
        lambda: vc.all_gather_into_tensor([0], x),
        "all_gather_into_tensor takes tensors, not list",
    ),
    "lazy": (
        lambda: vc.all_reduce_(torch.zeros(2, dtype=torch.complex64).conj()),
        "the output is a conjugated or negated view",
    ),
    "pair": (lambda: vc.permute(x, pairs=[(0, 5)]), "pairs=5 is not a member"),
    "sends-twice": (lambda: vc.permute(x, pairs=[(0, 1), (0, 0)]), "member 0 sends twice"),
    "receives-twice": (lambda: vc.permute(x, pairs=[(0, 1), (1, 1)]), "member 1 receives twice"),
    "scatter-sizes": (lambda: vc.scatter(x, sizes=[1, 1]), "sum to 2, but dim 0 has extent 4"),
    "scatter-even": (lambda: vc.scatter(x[:3]), "extent 3 of dim 0 is not divisible by 2"),
    "peer": (lambda: vc.send(x, target=9), "target=9 is not a member"),
    "self": (lambda: vc.send(x, target=dist.get_rank()), "is this member itself"),
    "gradient": (
        lambda: vc.send(x.clone().requires_grad_(), target=1 - dist.get_rank()),
        "send has no gradient",
    ),
    "strides": (lambda: vc.all_reduce_(x.T), "the output is not contiguous (shape (3, 4)"),
    "leaf": (lambda: vc.all_reduce_(x.clone().requires_grad_()), "writes in place"),
    "out": (
        lambda: vc.all_gather_into_tensor(torch.empty(7, 3), x),
        "(7, 3) on cpu, and the result",
    ),
    "out-dtype": (
        lambda: vc.reduce_scatter_tensor(x[:2].double(), x),
        "the output is torch.float64",
    ),
}


def bad_calls(rank, world_size):
    return refusals({name: call for name, (call, _) in BAD.items()})


def test_what_does_not_fit_is_found_before_anything_is_sent():
    for found in both_worlds(bad_calls, 2):
        assert list(found) == list(BAD)
        for name, (kind, words) in found.items():
            assert (kind, BAD[name][1] in words) == ("CommArgumentError", True), (name, words)


def outsider(rank, world_size):
    group = dist.new_group([0])
    return vc.all_reduce(torch.ones(2), group).tolist()


def test_a_group_of_others_is_the_wrong_group():
    first, second = outcomes(outsider, 2)
    assert first.value == [1.0, 1.0]
    assert second.type_name == "CommArgumentError"
    assert second.message == "rank 1 is not a member of the group that it was given"


def distributed_tensor(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    vc.all_reduce(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))


def test_a_distributed_tensor_is_not_a_local_one():
    for outcome in outcomes(distributed_tensor, 2):
        assert outcome.type_name == "CommArgumentError"
        assert "pass x.to_local()" in outcome.message


# What rank 0 calls alone, and how its error begins.
IN_VAIN = {
    "all_reduce of torch.float32 (4, 3)": lambda group: vc.all_reduce(x, group),
    "all_gather of torch.float32 (4, 3)": lambda group: vc.all_gather(x, group),
    "all_gather of torch.float32 (12,)": lambda group: vc.gather_pieces(
        x, group, shapes=[(4, 3), (1,)]
    ),
    "reduce_scatter of torch.float32 (4, 3)": lambda group: vc.reduce_scatter(x, group),
    "all_to_all of torch.float32 (24,)": lambda group: vc.all_to_all(
        [x, x], group, shapes=[(4, 3)] * 2
    ),
    "broadcast of torch.float32 (4, 3)": lambda group: vc.broadcast(x, group, source=1),
    "barrier": lambda group: vc.barrier(group),
}

# In these gloo waits as long as the group was made to, whatever was said later.
AS_MADE = ("all_gather of torch.float32 (12,)", "reduce_scatter of torch.float32 (4, 3)")


def wait_in_vain(rank, world_size):
    waits = [timedelta(seconds=2) if name in AS_MADE else None for name in IN_VAIN]
    groups = [dist.new_group(timeout=wait) for wait in waits]
    for group in groups:
        dist.barrier(group)  # so that both are connected
    messages = []
    with waiting_in_vain():
        for call, group in zip(IN_VAIN.values(), groups, strict=True):
            if rank == 0:
                set_group_timeout(group, timedelta(seconds=0.2))
                with pytest.raises(vc.CommTimeoutError) as caught:
                    call(group)
                assert isinstance(caught.value.__cause__, RuntimeError)
                messages.append(str(caught.value))
        dist.barrier()  # where the other one waits meanwhile
    return messages


def test_a_timeout_names_the_op_the_group_and_the_shape():
    for message, words in zip(run(wait_in_vain, 2)[0], IN_VAIN, strict=True):
        assert message.startswith(f"{words} over ranks 0, 1 (ranks [0, 1]) timed out: some member")


def test_one_base_class_and_the_builtin_ones():
    assert issubclass(vc.CommArgumentError, vc.CommError | ValueError)
    assert issubclass(vc.CommArgumentError, ValueError)
    assert issubclass(vc.CollectiveError, RuntimeError)
    assert issubclass(vc.CommTimeoutError, vc.CollectiveError)
    assert issubclass(vc.CollectiveError, vc.CommError)
