"""Cases: convolutions, normalisation over batches and groups, pooling, activations, pictures."""

from __future__ import annotations

import torch
from rule_fuzz import T
from rule_table import each

# Caches of keys and values begin as empty tensors of one dim.
each(
    "nn cat_cache",
    [
        lambda x, y: torch.cat([torch.tensor([], dtype=torch.float64), x, y], dim=-2),
        lambda x, y: torch.cat([x[0, 0, 0, :0], x], 1),
        lambda x, y: torch.cat([x, y[..., :0], y.flatten()[:0]], 3),
        lambda x, y: torch.cat([x.flatten()[:0], y.flatten()[:0]]),
        lambda x, y: torch.cat([x, y.flatten()], 1),
    ],
    T((3, 2, 5, 2)),
    T((3, 2, 5, 2)),
)
