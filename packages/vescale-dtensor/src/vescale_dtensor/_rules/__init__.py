"""The rules, by family. A rule is data: letters for dims, and what may be partial.

Every module has a `RULES` table, function → rule; importing this package registers them all.
"""

from __future__ import annotations

from vescale_dtensor._dispatch import register_handler, register_rule
from vescale_dtensor._rules import (
    along,
    assignment,
    attention,
    cast,
    combined,
    complex,
    composed,
    composed_index,
    conv,
    distance,
    dropouts,
    embedding,
    embedding_bag,
    factory,
    foreach,
    fused,
    index,
    initializers,
    join,
    linalg,
    lookup,
    loss,
    loss_pointwise,
    matmul,
    metadata,
    multihead,
    norm,
    pointwise,
    pool,
    products,
    put,
    random,
    recurrent,
    reduction,
    refused,
    reshape,
    reshaped,
    sampling,
    scalar,
    scaler,
    scan,
    scatter,
    search,
    selected,
    topk,
    unique,
    view,
)

_FAMILIES = (
    along,
    attention,
    combined,
    complex,
    conv,
    distance,
    embedding,
    index,
    join,
    linalg,
    lookup,
    loss,
    loss_pointwise,
    matmul,
    norm,
    pointwise,
    products,
    pool,
    put,
    random,
    recurrent,
    reduction,
    reshape,
    sampling,
    scan,
    scatter,
    search,
    selected,
    topk,
    unique,
    view,
)
_HANDLED = (
    assignment,
    cast,
    composed,
    composed_index,
    dropouts,
    embedding,
    embedding_bag,
    factory,
    foreach,
    fused,
    initializers,
    metadata,
    multihead,
    norm,
    put,
    random,
    recurrent,
    refused,
    reshaped,
    scalar,
    scaler,
)


def install() -> None:
    """Fill the tables of the dispatcher."""
    for family in _FAMILIES:
        for func, rule in family.RULES.items():
            register_rule(func, rule)
    for module in _HANDLED:
        for func, handler in module.HANDLERS.items():
            register_handler(func, handler, constant=func in metadata.CONSTANT)
