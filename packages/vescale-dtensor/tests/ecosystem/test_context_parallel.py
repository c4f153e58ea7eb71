"""torch's `context_parallel`: plain tensors are parts of sequences, attention is of whole ones."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_mesh import on_mesh
from torch import nn
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_dtensor import LayoutError, MeshError, UnsupportedError, init_device_mesh
from vescale_dtensor.experimental import context_parallel


class Model(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads, self.inside, self.outside = heads, nn.Linear(12, 36), nn.Linear(12, 12)
        self.positions = nn.Buffer(torch.randn(16, 12))

    def forward(self, x):
        batch, tokens, _ = x.shape
        x = x + self.positions[:tokens]
        parts = (
            self.inside(x)
            .view(batch, tokens, 3, self.heads, 12 // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.outside(mixed.transpose(1, 2).flatten(2))


def step(heads, tokens, ranks=None):
    torch.manual_seed(0)
    model = Model(heads)
    model.positions = nn.Buffer(model.positions[:tokens].clone())
    x, target = torch.randn(2, tokens, 12), torch.randn(2, tokens, 12)
    whole = x.clone()
    if ranks is None:
        loss = (model(x) - target).square().sum()
        loss.backward()
        return [loss.detach(), *[one.grad for one in model.parameters()]]
    mesh = init_device_mesh("cpu", (ranks,))
    buffers = [x, target, model.positions]
    with context_parallel(
        mesh, buffers=buffers, buffer_seq_dims=[1, -2, 0], no_restore_buffers={target}
    ):
        assert len(model.positions) == x.shape[1] == target.shape[1]
        loss = (model(x) - target).square().sum()
        loss.backward()
    assert torch.equal(x, whole)
    assert len(model.positions) == tokens
    assert target.shape[1] <= -(-tokens // ranks)
    found = [loss.detach(), *[one.grad for one in model.parameters()]]
    for one in found:
        dist.all_reduce(one)
    return found


@pytest.mark.parametrize("tokens", [16, 10, 3])
@pytest.mark.parametrize("heads", [4, 3])
def test_trains_as_one_device(heads, tokens):
    wanted = step(heads, tokens)
    for found in simulate(4).run(lambda rank, world_size: step(heads, tokens, 4)):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_bad_input_is_told_and_buffers_come_back():
    def program(mesh):
        x, parameter = torch.randn(1, 2, 4, 3), nn.Parameter(torch.ones(4))
        wrong = [
            (LayoutError, "1 buffers and 0", {"buffers": [x]}),
            (LayoutError, "has no dim 4", {"buffers": [x], "buffer_seq_dims": [4]}),
            (LayoutError, "no buffer", {"no_restore_buffers": {x}}),
            (UnsupportedError, "Parameter", {"buffers": [parameter], "buffer_seq_dims": [0]}),
        ]
        for error, words, given in wrong:
            with pytest.raises(error, match=words), context_parallel(mesh, **given):
                pass
        both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        with pytest.raises(MeshError, match="one dim"), context_parallel(both):
            pass
        with (
            pytest.raises(UnsupportedError, match="no attn_mask"),
            context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]),
        ):
            F.scaled_dot_product_attention(x, x, x, torch.ones(2, 4).bool())
        return x.shape

    assert on_mesh((2,), program) == [(1, 2, 4, 3)] * 2


@on_ranks(2, simulated=True)
def test_sequences_of_several_lengths(rank, world_size):
    """Of 8 tokens and of 7 the first rank has four each, and the second four and three."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size,))
    for lengths in ((7, 8), (8, 7), (5, 5), (4, 8)):
        wholes = [torch.randn(1, 2, length, 4) for length in lengths]
        wanted = [F.scaled_dot_product_attention(x, x, x) for x in wholes]
        buffers = [x.clone() for x in wholes]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2]):
            for x, whole in zip(buffers, wanted, strict=True):
                found = F.scaled_dot_product_attention(x, x, x)
                start = -(-whole.shape[2] // world_size) * rank
                torch.testing.assert_close(found, whole[:, :, start : start + x.shape[2]])
