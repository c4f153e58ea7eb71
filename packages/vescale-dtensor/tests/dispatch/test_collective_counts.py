"""A transformer block sends the textbook minimum each way, and its gradients are the dense ones.

Tensor parallel: one all-reduce after attention and one after the feed-forward layer, each way,
although three projections read one activation. Sequence parallel: a gather and a reduce-scatter
in place of each. Data parallel: nothing but the gradients, one collective for each kind.
"""

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import nn
from vescale_comm import trace
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import InterleavedShard, Replicate, Shard

HIDDEN, WIDE, HEADS = 16, 32, 4
COLUMN, ROW, WHOLE = Shard(0), Shard(1), Replicate()
ON_TP = {
    **{f"{name}.{part}": COLUMN for name in ("q", "k", "v", "up") for part in ("weight", "bias")},
    **dict.fromkeys(("norm", "norm2", "o.bias", "down.bias"), WHOLE),
    **dict.fromkeys(("qkv.weight", "qkv.bias", "c_bias"), InterleavedShard(0, 3)),
    "c_attn": InterleavedShard(1, 3),
    "o.weight": ROW,
    "down.weight": ROW,
}


class Block(nn.Module):
    """Plain PyTorch, but for two marks where a plan would redistribute."""

    def __init__(self, bias):
        super().__init__()
        self.norm = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.norm2 = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN, bias=bias))
        self.up = nn.Linear(HIDDEN, WIDE, bias=bias)
        self.down = nn.Linear(WIDE, HIDDEN, bias=bias)
        self.entering = self.leaving = lambda t: t

    def heads(self, x):
        return x.unflatten(2, (HEADS, -1)).transpose(1, 2)

    def projected(self, h):
        return self.q(h), self.k(h), self.v(h)

    def forward(self, x):
        h = self.entering(F.rms_norm(x, (HIDDEN,), self.norm))
        q, k, v = map(self.heads, self.projected(h))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.leaving(self.o(mixed.transpose(1, 2).flatten(2)))
        h = self.entering(F.rms_norm(x, (HIDDEN,), self.norm2))
        return x + self.leaving(self.down(F.gelu(self.up(h))))


class Fused(Block):
    """One projection for q, k and v, cut into three."""

    def __init__(self, bias):
        super().__init__(bias)
        del self.q, self.k, self.v
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=bias)

    def projected(self, h):
        return self.qkv(h).chunk(3, -1)


class Conv1d(Block):
    """One projection for q, k and v as GPT-2 has it: the weight transposed, then `addmm`."""

    def __init__(self, bias):
        super().__init__(True)
        del self.q, self.k, self.v
        self.c_attn = nn.Parameter(torch.randn(HIDDEN, 3 * HIDDEN) / 4)
        self.c_bias = nn.Parameter(torch.randn(3 * HIDDEN))

    def projected(self, h):
        flat = h.view(-1, h.size(-1))
        found = torch.addmm(self.c_bias, flat, self.c_attn)
        return found.view(*h.size()[:-1], 3 * HIDDEN).split(HIDDEN, dim=2)


KINDS = {kind.__name__: kind for kind in (Block, Fused, Conv1d)}


def block_on(mesh, dense, style):
    block = type(dense)(dense.o.bias is not None)
    on_tp = style != "data"
    for name, parameter in dense.named_parameters():
        placement = ON_TP[name] if on_tp else WHOLE
        placed = [placement if axis == "tp" else WHOLE for axis in mesh.mesh_dim_names]
        made = vd.distribute_tensor(parameter, mesh, placed, src_data_rank=None)
        module, _, leaf = name.rpartition(".")
        setattr(block.get_submodule(module), leaf, nn.Parameter(made))
    if on_tp:
        block.entering = lambda t: on_axis(t, WHOLE)
        block.leaving = lambda t: on_axis(t, Shard(1) if style == "sequence" else WHOLE)
    return block


def on_axis(tensor, placement):
    names = tensor.device_mesh.mesh_dim_names
    places = [
        placement if name == "tp" else old
        for name, old in zip(names, tensor.placements, strict=True)
    ]
    return tensor.redistribute(placements=places)


def measured(rank, world, sizes, style, bias, kind="Block"):
    mesh = device_mesh(tuple(sizes.values()), tuple(sizes))
    torch.manual_seed(0)
    dense, x = KINDS[kind](bias), torch.randn(4, 6, HIDDEN)
    block = block_on(mesh, dense, style)
    on = {"dp": Shard(0), "tp": Shard(1) if style == "sequence" else WHOLE}
    batch = vd.distribute_tensor(x, mesh, [on[axis] for axis in sizes], src_data_rank=None)
    with trace() as forward:
        loss = block(batch).square().sum()
    with trace() as backward:
        loss.backward()
    dense(x).square().sum().backward()
    for (name, ours), theirs in zip(block.named_parameters(), dense.parameters(), strict=True):
        whole = ours.grad.full_tensor()
        torch.testing.assert_close(whole, theirs.grad, rtol=2e-5, atol=2e-5, msg=name)
    return forward.counts(), backward.counts()


REDUCED = {"all_reduce": 2}
GATHERED = {"all_gather": 2, "reduce_scatter": 2}


MINIMA = [
    ({"tp": 4}, "tensor", REDUCED),
    ({"tp": 4}, "sequence", GATHERED),
    ({"dp": 4}, "data", {}),
    ({"dp": 2, "tp": 2}, "tensor", REDUCED),
    ({"dp": 2, "tp": 2}, "sequence", GATHERED),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("sizes", "style", "expected"), MINIMA)
def test_a_block_sends_the_textbook_minimum(sizes, style, expected, bias):
    for forward, backward in run(measured, 4, sizes, style, bias):
        assert forward == expected
        assert backward == expected


FUSED = [
    ("Fused", "tensor", REDUCED, REDUCED),
    ("Fused", "sequence", GATHERED, GATHERED),
    ("Conv1d", "tensor", REDUCED, REDUCED),
    # The view between the gather and its use is an op on whole tensors: its gradient is whole.
    ("Conv1d", "sequence", GATHERED, {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1}),
]


@pytest.mark.parametrize("sizes", [{"tp": 4}, {"dp": 2, "tp": 2}])
@pytest.mark.parametrize(("kind", "style", "there", "back"), FUSED)
def test_a_fused_projection_is_sharded_in_place(kind, sizes, style, there, back):
    for forward, backward in run(measured, 4, sizes, style, True, kind):
        assert forward == there
        assert backward == back
