"""What random programs are made of: a grammar is a table of lines, with slots to be filled.

`{x}` is a tensor that is there, and comes first; the other slots are in `slots.py`. A line that
begins with `=` makes a new tensor; any other changes what is there. Lines stand several times where
they are to be drawn more often.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grammar:
    """One kind of programs.

    Attributes:
        lines: templates; results are exact, given exact operands.
        rounded: templates whose results are rounded, so that the order of sums may show.
        dtypes: of the inputs.
        length: at most so many lines.
        gradients: the share of programs that are differentiated.
        largest: a line whose result holds larger numbers, in absolute value, is left out; of halves
            the sum of all elements must not exceed it, so that a sum in any order is exact.
    """

    lines: tuple[str, ...]
    rounded: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float64",)
    length: int = 8
    gradients: float = 0.8
    largest: float = 200.0


def table(text: str) -> tuple[str, ...]:
    """Templates, one in each line."""
    return tuple(line.strip() for line in text.strip().splitlines())


VIEWS = table("""
= {x}[{item}]
= {x}[{item}]
= {x}.reshape({shape})
= {x}.reshape({shape})
= {x}.view({shape})
= {x}.flatten({low}, {high})
= {x}.unflatten({d}, {factors})
= {x}.narrow({d}, {start}, {rest})
= {x}.select({d}, {at})
= {x}.transpose({d}, {e})
= {x}.permute({order})
= {x}.mT
= {x}.movedim({d}, {e})
= {x}.unsqueeze({d})
= {x}.squeeze()
= {x}.squeeze({d})
= {x}[:]
= {x}[None]
= {x}.expand({wider})
= {x}.unfold({d}, {n}, {n})
= {x}.diagonal({o}, {d}, {e})
= {x}.chunk({n}, {d})[{z}]
= {x}.split({n}, {d})[{z}]
= {x}.split({sizes}, {d})[{z}]
= {x}.tensor_split({n}, {d})[{z}]
= {x}.unbind({d})[{z}]
= {x}.view_as({x})
= {x}.detach()
= {x}.swapaxes({d}, {e})
= {x}.ravel()
= {x}.T if {x}.ndim == 2 else {x}.t()
""")

COPIES = table("""
= {x}.clone()
= {x} * 1
= {x}.contiguous()
= to({x}, {placements})
= to({x}, {placements})
= to({x}, {placements})
= {x}.repeat_interleave({n}, {d})
= {x}.tile({n})
= {x}.flip({d})
= {x}.roll({n}, {d})
= torch.cat([{x}, {s}], {d})
= torch.stack([{x}, {s}], {d})
= {x}.index_select({d}, {index})
= {x}[{columns}{index}]
= {x}.gather({d}, {places})
= {x}.tril({o})
= {x}.triu({o})
= F.pad({x}, ({o}, {n}), value=0.5)
= {x}.masked_fill({mask}, 0.5)
= torch.where({mask}, {x}, {s})
= {x}[{mask}]
""")

WRITES = table("""
{x}.mul_(0.5)
{x}.add_({w})
{x}.sub_({w})
{x}.copy_({w})
{x}.zero_()
{x}.fill_(0.25)
{x}.neg_()
{x}.clamp_(-1, 1)
{x}[{item}] = {k}
{x}[{item}] = {w}
{x}[{item}].mul_(2)
{x}[{item}].add_(1)
{x}.masked_fill_({mask}, 0.5)
{x}[{mask}] = {k}
{x}.index_fill_({d}, {index}, 0.5)
{x}.index_add_({d}, {index}, {x}.index_select({d}, {index}).detach().clone())
{x}.index_copy_({d}, {index}, {x}.index_select({d}, {index}).detach().clone())
{x}.index_put_(({index0},), torch.tensor(0.5, dtype={x}.dtype), accumulate=True)
{x}.scatter_({d}, {places}, 0.5)
{x}.t_()
{x}.transpose_({d}, {e})
{x}.squeeze_({d})
{x}.unsqueeze_({d})
{x}.relu_()
torch.relu_({x})
{x}.lerp_({s}.detach().clone(), 0.5)
{x}.addcmul_({s}.detach().clone(), {s}.detach().clone(), value=0.5)
{x}.fill_diagonal_(0.5)
{x}.tril_()
{x}.swapdims_({d}, {e})
{x}.real = 0.5
with torch.no_grad(): {x}.mul_(2)
with torch.no_grad(): {x}[{item}] = 0.5
""")

SUMS = table("""
= {x}.sum({d})
= {x}.sum()
= {x}.sum({d}, keepdim=True)
= {x}.cumsum({d})
= {x} + {y}
= {x} - {y}
= {x} * {k}
= {x} * {y}
= -{x}
= {x}.abs()
= {x}.amax({d})
= {x}.max({d})[{z2}]
= {x}.min()
= {x}.cummax({d})[0]
= {x}.cummin({d})[0]
= {x}.sort({d})[0]
= {x}.topk(1, {d})[0]
= {x}.clamp(-1, 1)
= {x}.relu()
= torch.maximum({x}, {y})
= {x} @ {v}
= {x}.diff(dim={d})
= {x}.square()
= {x}.nansum({d})
= torch.zeros_like({x})
= {x}.new_ones(3, 2)
= torch.full_like({x}, 0.5)
= {x} * (1.0 + bool(({x}.sum() > 0).item()))
= {x} + float({x}.numel() and {x}.max())
= {x} * len({x}.tolist() if {x}.ndim else [0])
""")

SMOOTH = table("""
= {x}.exp()
= {x}.sin() * {y}
= {x}.tanh()
= {x}.sigmoid()
= ({x}.abs() + 0.5).log()
= ({x}.square() + 0.5).sqrt()
= {x} / ({y}.abs() + 0.75)
= {x}.pow(3)
= {x}.erf()
= F.gelu({x})
= F.silu({x})
= F.softplus({x})
= F.elu({x})
= F.leaky_relu({x}, 0.3)
= F.hardtanh({x}, -0.8, 0.8)
= F.logsigmoid({x})
= {x}.atan2({y} + 2.5)
= {x}.mean({d})
= {x}.mean()
= {x}.mean({d}, keepdim=True) * {x}
= {x}.var({d})
= {x}.std({d}, correction=0)
= {x}.softmax({d})
= {x}.log_softmax({d})
= F.softmin({x}, {d})
= {x}.logsumexp({d})
= {x}.logcumsumexp({d})
= {x}.prod({d})
= {x}.cumprod({d})
= {x}.norm(dim={d})
= {x}.norm()
= torch.linalg.vector_norm({x}, 3, {d})
= torch.linalg.vector_norm({x}, 1.5, {d})
= {x}.norm(1, {d})
= {x}.norm(torch.inf, {d})
= F.normalize({x}, dim={d})
= F.cosine_similarity({x}, {s} + 0.3, {d})
= F.layer_norm({x}, {x}.shape[-1:])
= F.rms_norm({x}, {x}.shape[-1:])
= F.mse_loss({x}, {s} + 0.3)
= F.smooth_l1_loss({x}, {s} + 0.3)
= F.l1_loss({x}, {s} + 0.3, reduction="sum")
= F.binary_cross_entropy_with_logits({x}, {s}.sigmoid())
= F.kl_div({x}.log_softmax({d}), {s}.softmax({d}), reduction="sum")
= F.glu(torch.cat([{x}, {s}], {d}), {d})
= {x} @ {v}
= {x}.mT @ {x}
= torch.einsum("...i,...i->...", {x}, {s})
= torch.einsum("...ij,...kj->...ik", {x}, {s})
= torch.outer({x}.flatten(), {x}.sum({d}).flatten())
= torch.addcmul({x}, {s}, {s}, value=0.5)
= torch.lerp({x}, {s}, 0.3)
= F.linear({x}, {x}.reshape(-1, {x}.shape[-1]))
= torch.logaddexp({x}, {s})
= {x}.median({d})[0]
= {x}.quantile(0.3, {d})
= {x}.kthvalue(1, {d})[0]
= torch.cdist({x}, {s} + 0.3)
= {x}.renorm(2, {d}, 1.0)
= torch.trapezoid({x}, dim={d})
= F.avg_pool1d({x}, 2, 1, 1) if {x}.ndim in (2, 3) else {x}.cos()
= F.scaled_dot_product_attention({x}, {s}, {s}) if {x}.ndim > 1 else {x}.cos()
= torch.utils.checkpoint.checkpoint(torch.sin, {x}, use_reentrant=False)
""")

KINDS = table("""
= {x}.to({dtype})
= {x}.to({dtype})
= {x}.type_as({y})
= {x} + {y}
= {x} - {y}
= {x} * {y}
= {x} * {k}
= {x} + {k}
= {k} - {x}
= {x} * True
= {x} + {q}
= {x} // {k}
= {x} % {k}
= {x} / 2
= {x} << 1
= {x} & {y}
= {x} | {y}
= {x} ^ {y}
= ~{x}
= -{x}
= {x}.abs()
= {x} > {y}
= {x} == {y}
= {x}.logical_not()
= {x}.bool()
= torch.logical_xor({x}, {y})
= torch.where({mask}, {x}, {k})
= torch.where({mask}, {x}, {y})
= {x}.sum({d})
= {x}.sum()
= {x}.sum({d}, dtype={dtype})
= {x}.sum(dtype=torch.bool)
= {x}.cumsum({d})
= {x}.prod({d})
= {x}.amax({d})
= {x}.max({d})[{z2}]
= {x}.argmax({d})
= {x}.any({d})
= {x}.all()
= {x}.count_nonzero({d})
= {x}.clamp(-1, 2)
= {x}.sign()
= torch.maximum({x}, {y})
= {x}.sort({d}, stable=True)[{z2}]
= {x}.new_zeros(5).index_add(0, {five}, {x}.flatten()[:3])
= {x}.index_add({d}, {index}, {x}.index_select({d}, {index}))
= {x}.scatter_add({d}, {places}, {x})
= {x}.gather({d}, {places})
= {x}.masked_fill({mask}, 1)
= {x} @ {v}
= torch.cat([{x}, {y}]) if {x}.ndim else {x}
= torch.stack([{x}, {s}], {d})
= {x}.expand({wider})
= {x}.transpose({d}, {e})
= {x}[{item}]
= {x}.reshape({shape})
= to({x}, {placements})
= to({x}, {placements})
= torch.bincount({x}.flatten().clamp(0, 5))
= {x}.unique()
= {x}[{mask}]
= {x}.diff(dim={d})
= torch.isin({x}, {y})
= torch.bitwise_not({x})
= {x}.view(torch.int16)
= torch.promote_types({x}.dtype, {y}.dtype) == {x}.dtype
{x}.add_({w})
{x}.mul_({k})
{x}.mul_({w})
{x}.copy_({w})
{x}[{item}] = {k}
{x}[{mask}] = {k}
{x}.masked_fill_({mask}, 1)
{x}.bitwise_and_({w})
{x}.logical_not_()
{x} += {k}
""")

KINDS_ROUNDED = table("""
= {x}.float().mean({d}).round()
= {x}.softmax({d}).sum()
= {x}.double().std({d}).floor()
= {x}.float().norm(torch.inf, dim={d}).long()
= {x}.double().logsumexp({d}).to({dtype})
""")

GRAMMARS = {
    "views": Grammar((*VIEWS, *VIEWS, *VIEWS, *COPIES, *WRITES, *WRITES)),
    "operators": Grammar((*VIEWS, *COPIES, *SUMS), SMOOTH * 3, largest=100.0),
    "kinds": Grammar(
        KINDS,
        KINDS_ROUNDED,
        dtypes=("int64", "int32", "uint8", "bool", "float32", "bfloat16", "float16", "float64"),
        gradients=0.3,
    ),
    "cases": Grammar((*VIEWS, *WRITES), ("= {case}",) * 200, length=12, largest=100.0),
}
