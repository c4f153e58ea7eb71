"""A tensor that only lends its shape is not read: nothing is sent, however it lies."""

import pytest
import torch
import vescale_dtensor as vd
from on_mesh import on_mesh
from vescale_dtensor import Partial, Replicate, Shard
from vescale_dtensor.debug import CommDebugMode

WHOLE = torch.arange(24.0).reshape(6, 4)
LENDING = {
    "view_as": lambda x, y: x.view_as(y),
    "reshape_as": lambda x, y: x.reshape_as(y),
    "expand_as": lambda x, y: x.expand_as(y),
    "type_as": lambda x, y: x.type_as(y),
    "empty_like": lambda x, y: x if torch.empty_like(y).shape == x.shape else None,
}


@pytest.mark.parametrize("name", LENDING)
def test_nothing_is_sent(name):
    def ours(mesh):
        for placement in (Shard(0), Shard(1), Replicate(), Partial()):
            local = vd.distribute_tensor(WHOLE * 2, mesh, [Replicate()]).to_local()
            shape = (6, 4)
            lender = (
                vd.DTensor.from_local(local, mesh, [placement], shape=shape)
                if isinstance(placement, Partial)
                else vd.distribute_tensor(WHOLE * 2, mesh, [placement])
            )
            x = vd.distribute_tensor(WHOLE, mesh, [Shard(0)]).requires_grad_()
            for _ in range(2):  # the second call is compiled
                with CommDebugMode() as sent:
                    result = LENDING[name](x, lender)
                assert not sent.get_total_counts()
                assert result.placements == (Shard(0),)
                assert torch.equal(result.full_tensor(), WHOLE)
            (result * result).sum().backward()
            assert torch.equal(x.grad.full_tensor(), WHOLE * 2)

    on_mesh((2,), ours)


def test_plain_tensors_beside_dtensors():
    """A plain tensor that borrows the shape of a DTensor, and one that lends its own."""

    def ours(mesh):
        lender = vd.distribute_tensor(WHOLE, mesh, [Shard(0)])
        assert torch.equal((WHOLE.view(4, 6).view_as(lender) * lender).full_tensor(), WHOLE * WHOLE)
        assert torch.equal(lender.view_as(WHOLE).full_tensor(), WHOLE)
        with pytest.raises(RuntimeError):
            lender.view_as(torch.zeros(5))

    on_mesh((2,), ours)
