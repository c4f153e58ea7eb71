"""Cases: embedding, attention and losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rule_fuzz import T
from rule_table import each

# Embedding.
INDEX = T((3, 5), "i", high=7, partial=True)
TABLE = T((7, 4))
each(
    "embedding",
    [
        F.embedding,
        lambda i, w: F.embedding(i, weight=w),
        lambda i, w: F.embedding(i, w, padding_idx=2),
        lambda i, w: F.embedding(i, w, -1),
        lambda i, w: F.embedding(weight=w, input=i),
        lambda i, w: F.embedding(i[0, 0], w),
        lambda i, w: F.embedding(i.int(), w),
        lambda i, w: w[i],
        lambda i, w: F.embedding(i, w, 9),
        lambda i, w: F.embedding(i.flatten(), w, padding_idx=-7),
        lambda i, w: F.embedding(i, w, -8),
    ],
    INDEX,
    TABLE,
)
# Attention.
Q, K = T((2, 4, 5, 3)), T((2, 4, 6, 3))
SDPA = F.scaled_dot_product_attention
each(
    "attention",
    [
        SDPA,
        lambda q, k, v: SDPA(q, k, v, is_causal=True),
        lambda q, k, v: SDPA(q, k, value=v, scale=0.3),
        lambda q, k, v: SDPA(q, k, v, attn_mask=torch.ones(5, 6, dtype=torch.bool).tril(1)),
        lambda q, k, v: SDPA(q, k, v, dropout_p=0.4),
        lambda q, k, v: SDPA(q, k, v, dropout_p=0.3, is_causal=True),
        lambda q, k, v: SDPA(q, k, v, torch.zeros(2, 1, 5, 6, dtype=torch.float64).fill_(0.5), 0.2),
        lambda q, k, v: SDPA(query=q, key=k, value=v),
        lambda q, k, v: SDPA(value=v, key=k, query=q),
        lambda q, k, v: SDPA(q[0], k[0], v[0]),
        lambda q, k, v: SDPA(q, k, v, dropout_p=1.5),
        lambda q, k, v: SDPA(q, k, v, torch.ones(4, 1, 1, dtype=torch.bool)),
        lambda q, k, v: SDPA(q, k[:, :, :5], v),
        lambda q, k, v: SDPA(q, k, v, torch.ones(5, 6, dtype=torch.bool), is_causal=True),
        lambda q, k, v: SDPA(q, k, v, torch.ones(5, 6, dtype=torch.bool), 0.2, True),
        lambda q, k, v: SDPA(q, k, v, dropout_p=0.5, scale=0.1).transpose(1, 2).reshape(2, 5, 12),
    ],
    Q,
    K,
    T((2, 4, 6, 2)),
    strides=False,
)
GROUPED = [
    lambda q, k, v: SDPA(q, k, v),
    lambda q, k, v: SDPA(q, k, v, enable_gqa=True),
    lambda q, k, v: SDPA(q, k, v, enable_gqa=True, is_causal=True),
    lambda q, k, v: SDPA(q, k, v, dropout_p=0.4, enable_gqa=True),
    lambda q, k, v: SDPA(q, k, v, dropout_p=0.4, enable_gqa=True, is_causal=True),
]
for tag, queries, keys in (
    ("gqa", (2, 8, 5, 4), (2, 4, 5, 4)),
    ("odd", (3, 6, 2, 4), (3, 2, 2, 4)),
    ("few", (1, 9, 2, 4), (1, 3, 2, 4)),
    ("one", (2, 4, 5, 3), (1, 4, 6, 3)),
    ("head", (2, 4, 5, 3), (2, 1, 6, 3)),
):
    operands = T(queries), T(keys), T(keys)
    each(f"attention_{tag}", GROUPED, *operands, strides=False)
each(
    "attention_odd_heads",
    [
        lambda q, k, v: SDPA(q, k, v, torch.ones(6, 2, 1).bool(), enable_gqa=True),
        lambda q, k, v: SDPA(q, k, v, q.sum((0, 3))[:, :, None] * 1, enable_gqa=True),
        lambda q, k, v: SDPA(q[0], k[0].repeat_interleave(3, 0), v[0].repeat_interleave(3, 0)),
    ],
    T((3, 6, 2, 4)),
    T((3, 2, 2, 4)),
    T((3, 2, 2, 4)),
    strides=False,
)
each(
    "attention_deep",
    [SDPA, lambda q, k, v: SDPA(q, k, v, dropout_p=0.3)],
    T((2, 1, 3, 2, 4)),
    T((2, 5, 1, 3, 4)),
    T((2, 5, 3, 3, 4)),
    strides=False,
)
each(
    "attention_mask",
    [
        lambda q, k, v, m: SDPA(q, k, v, m),
        lambda q, k, v, m: SDPA(q, k, v, attn_mask=m, dropout_p=0.2),
        lambda q, k, v, m: SDPA(q, k, v, m > 0),
        lambda q, k, v, m: SDPA(q, k, v, attn_mask=m[:, :1]),
        lambda q, k, v, m: SDPA(q, k, v, m[0]),
        lambda q, k, v, m: SDPA(q, k, attn_mask=m, value=v),
    ],
    Q,
    K,
    K,
    T((2, 4, 5, 6), grad=False),
    strides=False,
)

# Losses.
MARGIN = F.multi_margin_loss
LOSS = [
    F.cross_entropy,
    lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    lambda x, t: F.cross_entropy(x, t, reduction="none"),
    lambda x, t: F.cross_entropy(x, t, ignore_index=1),
    lambda x, t: F.cross_entropy(x, t, label_smoothing=0.2),
    lambda x, t: F.cross_entropy(x, t, ignore_index=0, reduction="sum"),
    lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1, reduction="none"),
    lambda x, t: F.cross_entropy(x, target=t),
    lambda x, t: F.cross_entropy(target=t, input=x),
    lambda x, t: F.cross_entropy(x, t * 0 - 100),
    lambda x, t: F.cross_entropy(x, t, reduction="wrong"),
    lambda x, t: F.nll_loss(F.log_softmax(x, 1), t),
    lambda x, t: F.cross_entropy(x, t, ignore_index=1, reduction="none"),
    lambda x, t: F.cross_entropy(x.float(), t).double().round(decimals=5),
    lambda x, t: F.cross_entropy(x, t.where(t > 0, -100)),
    lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1, ignore_index=1, reduction="sum"),
    MARGIN,
    lambda x, t: F.cross_entropy(x, t, ignore_index=255),
    lambda x, t: F.cross_entropy(x, t.where(t > 0, 255), ignore_index=255),
    lambda x, t: F.cross_entropy(x * 100, t),
]
for tag, rows, classes in (
    ("even", 8, 8),
    ("uneven", 5, 7),
    ("few", 2, 3),
    ("none", 0, 6),
    ("classes", 6, 2),
):
    each(
        f"loss_{tag}_",
        # Of no rows, torch's mean of this one is whatever memory held.
        LOSS if rows else [loss for loss in LOSS if loss is not MARGIN],
        T((rows, classes)),
        T((rows,), "i", high=classes),
        data=True,
    )
each("loss_dims", LOSS, T((3, 4, 5)), T((3, 5), "i", high=4), data=True)
each("loss_empty_dims", LOSS[:9], T((1, 4, 2, 3)), T((1, 2, 3), "i", high=4), strides=False)
each(
    "loss_single",
    [F.cross_entropy, lambda x, t: F.cross_entropy(x, t, reduction="sum")],
    T((6,)),
    T((), "i", high=6),
)
