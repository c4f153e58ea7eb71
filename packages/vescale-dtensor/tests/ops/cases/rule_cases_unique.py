"""Cases: what differs among elements or slices, where it is, and how often."""

from __future__ import annotations

import torch
from rule_fuzz import T
from rule_table import add, each

UNIQUE = [
    lambda x: x.unique(),
    lambda x: torch.unique(x, return_inverse=True),
    lambda x: torch.unique(x, False, True, True),
    lambda x: x.unique(return_counts=True),
    lambda x: torch.unique(x, dim=0),
    lambda x: torch.unique(x, return_inverse=True, return_counts=True, dim=-1),
    lambda x: x.unique(dim=1, return_inverse=True),
    lambda x: x.unique_consecutive(),
    lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True),
    lambda x: torch.unique_consecutive(x, return_counts=True, dim=0),
    lambda x: torch.unique_consecutive(x, True, True, 1),
    lambda x: x.unique_consecutive(True)[1].sum(0),
]
each("unique", UNIQUE, T((7, 4), "i", high=2), exact=True)
each("unique_many", UNIQUE, T((6, 3), "i", high=50), exact=True)
each("unique_floats", UNIQUE, T((5, 4)), exact=True)
each("unique_flags", [UNIQUE[i] for i in (0, 1, 2, 4, 7, 8, 10)], T((5, 3), "b"), exact=True)
each("unique_cube", UNIQUE, T((4, 3, 2), "i", high=1), exact=True)
each("unique_one", UNIQUE[:5], T((1, 1), "i"), exact=True)
each(
    "unique_row",
    [UNIQUE[i] for i in (0, 1, 2, 3, 4, 7, 8, 9, 11)],
    T((9,), "i", high=3),
    exact=True,
)
each("unique_empty", UNIQUE, T((0, 3), "i"), exact=True)
each("unique_none", UNIQUE, T((3, 0), "i"), exact=True)
each("unique_number", [UNIQUE[i] for i in (0, 1, 3, 7, 8)], T((), "i"), exact=True)
add("unique_outside", lambda x: x.unique(dim=2), T((3, 4), "i"), exact=True)
