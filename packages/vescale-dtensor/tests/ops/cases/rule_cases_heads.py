"""Cases: attention of several heads with its projections, as a function and in torch's modules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rule_fuzz import T
from rule_table import each

HEADS, WIDTH = 4, 8
MHA = F.multi_head_attention_forward


def attend(x, w, b, o, key=None, value=None, heads=HEADS, **more):
    """Attention to itself, or to keys and values."""
    options = {
        "bias_k": None,
        "bias_v": None,
        "add_zero_attn": False,
        "dropout_p": 0.0,
        "out_proj_bias": None if b is None else b[:WIDTH],
        **more,
    }
    key = x if key is None else key
    value = key if value is None else value
    return MHA(x, key, value, WIDTH, heads, w, b, out_proj_weight=o, **options)


def apart(x, w, b, o, **more):
    """Keys and values of other widths."""
    parts = {f"{n}_proj_weight": part for n, part in zip("qkv", w.chunk(3), strict=True)}
    parts["k_proj_weight"] = parts["k_proj_weight"][:, :5]
    parts["v_proj_weight"] = parts["v_proj_weight"][:, :3]
    value = x[..., :3] * 2
    return attend(
        x, None, b, o, x[..., :5] * 1, value, use_separate_proj_weight=True, **parts, **more
    )


def padding(x):
    """The last key of every second sequence is none."""
    mask = torch.zeros(*x.shape[1:-1], x.shape[0], dtype=torch.bool)
    mask[..., ::2, -1] = True
    return mask


def causal(x, dtype=torch.bool):
    mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
    return (
        mask if dtype is torch.bool else torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -9)
    )


def each_head(x):
    count = HEADS * (x.shape[1] if x.ndim == 3 else 1)
    generator = torch.Generator().manual_seed(0)
    shape = (count, x.shape[0], x.shape[0])
    return torch.randn(shape, generator=generator, dtype=torch.float64)


CALLS = [
    attend,
    lambda *a: attend(*a, need_weights=False),
    lambda *a: attend(*a, average_attn_weights=False),
    lambda *a: attend(*a, dropout_p=0.4),
    lambda *a: attend(*a, dropout_p=0.4, need_weights=False),
    lambda *a: attend(*a, dropout_p=0.4, training=False, need_weights=False),
    lambda *a: attend(*a, key_padding_mask=padding(a[0])),
    lambda *a: attend(*a, key_padding_mask=padding(a[0]), need_weights=False),
    lambda *a: attend(*a, attn_mask=causal(a[0])),
    lambda *a: attend(*a, attn_mask=causal(a[0]), is_causal=True, need_weights=False),
    lambda *a: attend(*a, attn_mask=causal(a[0]), is_causal=True),
    lambda *a: attend(*a, is_causal=True, need_weights=False),
    lambda *a: attend(
        *a, attn_mask=causal(a[0]), key_padding_mask=padding(a[0]), need_weights=False
    ),
    lambda *a: attend(*a, attn_mask=each_head(a[0]), need_weights=False),
    lambda *a: attend(*a, attn_mask=each_head(a[0]), dropout_p=0.2),
    lambda *a: attend(*a, attn_mask=causal(a[0], torch.float64), add_zero_attn=True),
    lambda *a: attend(*a, add_zero_attn=True, need_weights=False, key_padding_mask=padding(a[0])),
    lambda x, w, b, o: attend(x, w, b, o, bias_k=b[None, None, :8], bias_v=b[None, None, 8:16]),
    lambda x, w, b, o: attend(
        x,
        w,
        b,
        o,
        bias_k=b[None, None, :8],
        bias_v=b[None, None, 8:16],
        add_zero_attn=True,
        attn_mask=causal(x),
        key_padding_mask=padding(x),
        need_weights=False,
    ),
    lambda x, w, b, o: attend(x, w, b, o, key=x[:2] * 2, need_weights=False),
    lambda x, w, b, o: attend(x, w, b, o, key=x[:2] * 2, value=x[:2] * 3),
    lambda x, w, b, o: attend(x, w, None, o),
    apart,
    lambda *a: apart(*a, need_weights=False, dropout_p=0.3),
    lambda *a: attend(*a, heads=2, need_weights=False),
    lambda *a: attend(*a, heads=3),
    lambda *a: attend(*a, key_padding_mask=padding(a[0])[..., :1]),
    lambda x, w, b, o: attend(x, w, b, o, bias_k=b[None, None, :8]),
    lambda x, w, b, o: attend(x, w[:16], b, o),
    lambda x, w, b, o: attend(x, w, b, o, key=x * 1, static_v=x[..., :2].flatten(1)),
]
WEIGHTS = (T((3 * WIDTH, WIDTH)), T((3 * WIDTH,)), T((WIDTH, WIDTH)))
for tag, shape in (("", (4, 3, 8)), ("_few", (2, 2, 8)), ("_one", (3, 8)), ("_none", (3, 0, 8))):
    each(f"heads{tag}", CALLS, T(shape), *WEIGHTS, strides=False)
