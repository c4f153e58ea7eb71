"""A sample of each family of operators: on one device, and along each dim on ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Operator:
    """One function, and what it is given.

    Attributes:
        name: of the function.
        call: the function of tensors.
        shapes: of its operands.
        first: whether only the first operand is sharded, and others are whole.
        integers: which operands are integers below 5.
    """

    name: str
    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    first: bool = False
    integers: tuple[int, ...] = ()

    def operands(self, device: torch.device) -> list[Tensor]:
        """The same values on every device: of uneven extents, which no number of ranks divides."""
        generator = torch.Generator().manual_seed(len(self.name))
        made = []
        for at, shape in enumerate(self.shapes):
            if at in self.integers:
                value = torch.randint(5, shape, generator=generator)
            else:
                value = torch.randn(shape, generator=generator)
            made.append(value.to(device))
        return made

    def on_one_device(self, device: torch.device) -> dict[str, Tensor]:
        """Its results and gradients."""
        given = self.operands(device)
        leaves = [one.requires_grad_() for one in given if one.is_floating_point()]
        torch.manual_seed(5)
        return _results(self.call(*given), leaves)

    def on_ranks(self, device: torch.device, ranks: int) -> dict[str, dict[str, Tensor]]:
        """The same for each layout; called on every rank."""
        import vescale_dtensor as vd

        mesh = vd.init_device_mesh(device.type, (ranks,), mesh_dim_names=("x",))
        found = {}
        for dim in (*range(len(self.shapes[0])), None):
            placement = vd.Replicate() if dim is None else vd.Shard(dim)
            given = []
            for at, one in enumerate(self.operands(device)):
                own = placement if not at or self._has(at, dim) else vd.Replicate()
                made = vd.distribute_tensor(one, mesh, [own], src_data_rank=None)
                given.append(made.requires_grad_() if one.is_floating_point() else made)
            leaves = [one for one in given if one.is_floating_point()]
            torch.manual_seed(5)
            result = _results(self.call(*given), leaves)
            found[str(placement)] = {name: one.full_tensor() for name, one in result.items()}
        return found

    def _has(self, at: int, dim: int | None) -> bool:
        return not self.first and dim is not None and dim < len(self.shapes[at])


def _results(result: Any, leaves: Sequence[Tensor]) -> dict[str, Any]:
    values = [result] if isinstance(result, Tensor) else list(result)
    scored = [one for one in values if one.requires_grad]
    found = {f"result {at}": one.detach() for at, one in enumerate(values)}
    if scored:
        # Each element counts otherwise, so that gradients in wrong places show.
        total: Any = sum((one * one.detach().cos()).sum() for one in scored)
        total.backward()
        for at, leaf in enumerate(leaves):
            if leaf.grad is not None:
                found[f"gradient {at}"] = leaf.grad
    return found


def _one(name: str, call: Callable[..., Any], *shapes: tuple[int, ...], **more: Any) -> Operator:
    return Operator(name, call, shapes, **more)


def _attention(causal: bool) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)


S: Final = (7, 6)
"""A shape that two, four and eight ranks divide unevenly; eight leave ranks empty."""

FAMILIES: Final[dict[str, tuple[Operator, ...]]] = {
    "pointwise": (
        _one("gelu", F.gelu, S),
        _one("x * y + y", lambda x, y: x * y + y, S, S),
        _one("where", lambda x, y: torch.where(x > 0, x, y), S, S),
        _one("broadcast", lambda x, y: x / (y.abs() + 1), S, (6,)),
    ),
    "products": (
        _one("mm", torch.mm, S, (6, 5), first=True),
        _one("linear", F.linear, (7, 4, 6), (5, 6), (5,), first=True),
        _one("bmm", torch.bmm, (7, 4, 6), (7, 6, 3), first=True),
        _one("einsum", lambda x, y: torch.einsum("ij,kj->ik", x, y), S, (5, 6)),
    ),
    "reductions": (
        _one("sum", lambda x: x.sum(0), S),
        _one("mean", lambda x: x.mean(), S),
        _one("amax", lambda x: x.amax(1), S),
        _one("var", lambda x: x.var(0), S),
        _one("norm", lambda x: x.norm(), S),
        _one("logsumexp", lambda x: x.logsumexp(1), S),
    ),
    "softmax and losses": (
        _one("softmax", lambda x: x.softmax(1), S),
        _one("cross entropy", F.cross_entropy, S, (7,), integers=(1,)),
        _one("mse", F.mse_loss, S, S),
    ),
    "normalisation": (
        _one("layer norm", lambda x, w: F.layer_norm(x, (6,), w), S, (6,), first=True),
        _one("rms norm", lambda x: F.rms_norm(x, (6,)), S),
        _one("group norm", lambda x: F.group_norm(x, 2), (7, 6, 4)),
    ),
    "views": (
        _one("reshape", lambda x: x.reshape(7, 2, 3).transpose(0, 1).flatten(1), S),
        _one("cat", lambda x, y: torch.cat([x, y]), S, S),
        _one("chunk", lambda x: x.chunk(3, 1)[1] + 1, S),
        _one("flip and roll", lambda x: x.flip(0).roll(1, 1), S),
    ),
    "indexing": (
        _one("embedding", lambda x, i: F.embedding(i, x), S, (4, 3), first=True, integers=(1,)),
        _one("index_select", lambda x, i: x.index_select(0, i), S, (4,), first=True, integers=(1,)),
        _one("gather", lambda x, i: x.gather(1, i), S, S, integers=(1,)),
        _one("slice", lambda x: x[1:5, ::2] * 1, S),
        _one("tril", lambda x: x.tril(), S),
    ),
    "sorts and scans": (
        _one("sort", lambda x: x.sort(0).values, S),
        _one("topk", lambda x: x.topk(3, 1).values, S),
        _one("cumsum", lambda x: x.cumsum(0), S),
        _one("cumprod", lambda x: x.cumprod(1), S),
    ),
    "attention": (
        _one("causal", _attention(True), (3, 4, 8, 4), (3, 4, 8, 4), (3, 4, 8, 4)),
        _one("full", _attention(False), (3, 4, 8, 4), (3, 4, 8, 4), (3, 4, 8, 4)),
    ),
    "convolutions": (
        _one("conv1d", lambda x, w: F.conv1d(x, w, padding=1), (7, 4, 9), (6, 4, 3), first=True),
        _one("conv2d", lambda x, w: F.conv2d(x, w), (4, 3, 6, 6), (4, 3, 3, 3), first=True),
        _one("max pool", lambda x: F.max_pool1d(x, 2), (7, 4, 8)),
    ),
    "random": (
        _one("dropout", lambda x: F.dropout(x, 0.5), S),
        _one("randn_like", lambda x: x * torch.randn_like(x), S),
        _one("bernoulli", lambda x: x * torch.bernoulli(x.detach().sigmoid()), S),
    ),
}
