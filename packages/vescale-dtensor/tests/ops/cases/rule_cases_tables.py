"""Cases: tables that are looked up, row by row or in bags, and scaled where they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rule_fuzz import T
from rule_table import each

ROWS = 7
LOOK_UPS = [
    lambda i, w: F.embedding(i, w, max_norm=1.0),
    lambda i, w: F.embedding(i, w, max_norm=0.7, norm_type=1.0),
    lambda i, w: F.embedding(i, w, max_norm=0.5, norm_type=float("inf")),
    lambda i, w: F.embedding(i, w, max_norm=2.0, norm_type=0),
    lambda i, w: F.embedding(i, w, 2, 1.0),
    lambda i, w: F.embedding(i.flatten()[:2], w, max_norm=1.0) + w.sum(),
    lambda i, w: F.embedding(i, w, scale_grad_by_freq=True),
    lambda i, w: F.embedding(i, w, 1, 1.0, 3.0, True),
    lambda i, w: F.embedding(i[:0], w, max_norm=1.0),
    lambda i, w: F.embedding(i[:0], w, scale_grad_by_freq=True),
    lambda i, w: F.embedding(i[0, 0], w, scale_grad_by_freq=True),
    lambda i, w: F.embedding(i[0, 0], w, max_norm=0.3),
    lambda i, w: torch.embedding(w, i),
    lambda i, w: torch.embedding(w, i, 2, True),
    lambda i, w: torch.embedding(weight=w, indices=i, padding_idx=1),
    lambda i, w: torch.embedding_renorm_(w.detach(), i, 1.0, 2.0),
    lambda i, w: F.embedding(i, w.detach(), sparse=True),
]
for tag, shape in (("", (3, 5)), ("_few", (2, 1)), ("_one", (1, 1))):
    each(
        f"lookup{tag}",
        LOOK_UPS,
        T(shape, "i", high=ROWS, partial=False),
        T((ROWS, 4)),
        strides=False,
    )
each("lookup_narrow", LOOK_UPS, T((3, 2), "i", high=2, partial=False), T((2, 1)))

MODES = ("sum", "mean", "max")
BAGS = [lambda i, w, s, mode=mode: F.embedding_bag(i, w, mode=mode) for mode in MODES]
BAGS += [
    lambda i, w, s, mode=mode: F.embedding_bag(i, w, mode=mode, padding_idx=1) for mode in MODES
]
BAGS += [
    lambda i, w, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s),
    lambda i, w, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s, padding_idx=-2),
    lambda i, w, s: F.embedding_bag(i, w, mode="mean", per_sample_weights=s),
    lambda i, w, s: F.embedding_bag(i, w, max_norm=0.8),
    lambda i, w, s: F.embedding_bag(i, w, mode="sum", scale_grad_by_freq=True),
    lambda i, w, s: F.embedding_bag(i, w, scale_grad_by_freq=True),
    lambda i, w, s: F.embedding_bag(i, w, mode="wrong"),
    lambda i, w, s: F.embedding_bag(i + 40, w),
    lambda i, w, s: F.embedding_bag(w, i),
    lambda i, w, s: F.embedding_bag(i, w, offsets=i[:, 0]),
    lambda i, w, s: F.embedding_bag(i.int(), w, mode="sum"),
    lambda i, w, s: F.embedding_bag(i, w.detach(), mode="sum", sparse=True),
]
OFFSETS = torch.tensor([0, 2, 2, 3])
LISTS = [
    lambda i, w, s, mode=mode, last=last, padding=padding: F.embedding_bag(
        i, w, OFFSETS, mode=mode, include_last_offset=last, padding_idx=padding
    )
    for mode in MODES
    for last in (False, True)
    for padding in (None, 2)
]
LISTS += [
    lambda i, w, s: F.embedding_bag(i, w, OFFSETS, mode="sum", per_sample_weights=s),
    lambda i, w, s: F.embedding_bag(
        i, w, OFFSETS, mode="sum", per_sample_weights=s, padding_idx=1, include_last_offset=True
    ),
    lambda i, w, s: F.embedding_bag(i, w, OFFSETS, max_norm=0.5, norm_type=1.0),
    lambda i, w, s: F.embedding_bag(i, w, OFFSETS[:1], mode="max"),
    lambda i, w, s: F.embedding_bag(i, w),
    lambda i, w, s: F.embedding_bag(i, w, OFFSETS + 1),
]
for tag, shape, calls in (
    ("", (5, 3), BAGS),
    ("_few", (2, 2), BAGS),
    ("_none", (0, 2), BAGS),
    ("_thin", (3, 0), BAGS),
    ("_listed", (9,), LISTS),
    ("_short", (3,), LISTS),
):
    operands = (T(shape, "i", high=ROWS, partial=False), T((ROWS, 4)), T(shape))
    each(f"bag{tag}", calls, *operands, data=True, strides=False)
