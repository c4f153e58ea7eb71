"""Models, batches and meshes of the tests of joint graphs."""

import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import nn
from vescale_comm.testing import device_mesh
from vescale_dtensor import Replicate, Shard


class Llama(nn.Module):
    """A block of rotary attention and a gated layer, under a loss over the vocabulary."""

    def __init__(self, size=16, heads=4, words=24, p=0.1):
        super().__init__()
        self.heads, self.p = heads, p
        self.embed, self.norm = nn.Embedding(words, size), nn.RMSNorm(size)
        self.q, self.k, self.v, self.o = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(size, 2 * size), nn.Linear(size, 2 * size)
        self.down, self.head = nn.Linear(2 * size, size), nn.Linear(size, words, bias=False)

    def turned(self, x):
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[-2])[:, None] / (1 + torch.arange(half))
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def forward(self, words):
        x = self.embed(words[:, :-1])
        y = self.norm(x)
        q, k, v = (m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for m in (self.q, self.k, self.v))  # fmt: skip
        mixed = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        x = x + F.dropout(self.o(mixed.transpose(1, 2).flatten(2)), self.p, self.training)
        y = self.norm(x)
        x = x + F.dropout(self.down(F.silu(self.gate(y)) * self.up(y)), self.p, self.training)
        return F.cross_entropy(self.head(x).flatten(0, 1), words[:, 1:].flatten())


class Net(nn.Module):
    """Layers with biases, batch norm's running statistics, and a parameter that is not used."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24, 12)
        self.up, self.norm, self.down = nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Linear(20, 1)
        self.drop, self.spare = nn.Dropout(0.3), nn.Parameter(torch.ones(3))
        self.same = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.one, self.two = self.same

    def forward(self, words):
        x = self.drop(self.norm(self.up(self.embed(words).mean(1)).relu()))
        # Two gradients that are one tensor in backward.
        return (self.down(x) ** 2).mean() + (self.one + self.two).sum()


CUT = {"q": 0, "k": 0, "v": 0, "gate": 0, "up": 0, "o": 1, "down": 1, "head": 0}
MODELS = {"llama": Llama, "net": Net}


def built(kind, mesh):
    torch.manual_seed(0)
    model = MODELS[kind]()
    if "tp" in mesh.mesh_dim_names:
        for name, module in model.named_modules():
            if kind == "llama" and name in CUT:
                for part, p in list(module.named_parameters()):
                    whole = part == "bias" and CUT[name] == 1
                    layout = [Replicate()] * (mesh.ndim - 1)
                    layout.append(Replicate() if whole else Shard(CUT[name]))
                    setattr(module, part, nn.Parameter(vd.distribute_tensor(p.data, mesh, layout)))
    return vd.distribute_module(model, mesh)


def batch(mesh, step):
    words = torch.randint(24, (5, 7), generator=torch.Generator().manual_seed(step))
    layout = [Shard(0) if name == "dp" else Replicate() for name in mesh.mesh_dim_names]
    return vd.distribute_tensor(words, mesh, layout, src_data_rank=None)


def locals_of(values):
    return [getattr(value, "_local_tensor", value) for value in values]


def mesh_of(axes, world_size):
    sizes = {"dp": (world_size,), "tp": (world_size,), "dp tp": (2, 2)}[axes]
    return device_mesh(sizes, tuple(axes.split()))
