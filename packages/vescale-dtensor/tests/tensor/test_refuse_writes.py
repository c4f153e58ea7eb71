"""Memory of which that is said is not written to by DTensors, whichever way they come to it."""

import pytest
import torch
import vescale_dtensor as vd
from vescale_comm.testing import on_ranks
from vescale_dtensor import Replicate


class OwnError(Exception):
    pass


def item(x):
    x[0] = 1.0


WRITES = [
    lambda x: x.mul_(2),
    lambda x: x[0].mul_(2),
    lambda x: x.data.mul_(2),
    lambda x: x.view(-1)[2:].zero_(),
    lambda x: torch.mul(x, 2, out=x),
    lambda x: torch._foreach_mul_([x], 2),
    item,
]


@on_ranks(2, simulated=True)
def test_writes_are_refused(rank, world_size):
    mesh = vd.init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    whole = torch.arange(12.0)
    x = vd.DTensor.from_local(whole[4:10].view(3, 2), mesh, [Replicate()])
    other = vd.distribute_tensor(torch.ones(3, 2), mesh, [Replicate()])
    for permitted in (True, False, True):
        for write in WRITES:
            before = whole.clone()
            if permitted:
                write(x)
                whole.copy_(before)
            else:
                vd.refuse_writes(whole, lambda local: OwnError(local.storage_offset()))
                # Twice: the second call of a kind is a compiled one.
                for _ in range(2):
                    with pytest.raises(OwnError):
                        write(x)
                other.mul_(2)
                assert torch.equal(whole, before)
                vd.permit_writes(whole)


@on_ranks(2, simulated=True)
def test_what_was_refused_is_permitted_when_nobody_holds_the_memory(rank, world_size):
    mesh = vd.init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    whole = torch.arange(12.0)
    vd.refuse_writes(whole, lambda local: OwnError())
    # Its storage lives on, as one that is given the same address would.
    x = vd.DTensor.from_local(whole[4:10].data, mesh, [Replicate()])
    with pytest.raises(OwnError):
        x.mul_(2)
    again = whole.data
    del whole
    x.mul_(2)
    vd.refuse_writes(again, lambda local: OwnError())
    with pytest.raises(OwnError):
        x.mul_(2)
    vd.permit_writes(again)
