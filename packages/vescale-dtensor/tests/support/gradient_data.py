"""What tests of gradients share: data, DTensors of it, and how to compare."""

import torch
import vescale_dtensor as vd
from vescale_comm.testing import device_mesh


def mesh22():
    return device_mesh((2, 2), ("dp", "tp"))


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sharded(tensor, mesh, dp, tp, grad=False):
    leaf = tensor.clone().requires_grad_(grad)
    return vd.distribute_tensor(leaf, mesh, [dp, tp], src_data_rank=None)


def close(ours, dense):
    whole = ours.full_tensor() if isinstance(ours, vd.DTensor) else ours
    torch.testing.assert_close(whole.detach(), dense.detach(), rtol=2e-5, atol=2e-6)
