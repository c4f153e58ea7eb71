"""Sequence parallelism: where activations change between sharded features and sharded sequences.

Between the column- and row-parallel layers of a block every rank has whole sequences; outside, in
norms, dropouts and residual additions, each has a part of every sequence (Korthikanti et al.,
arXiv 2205.05198, section 4.2.2). All-gathers stand where a block begins, reduce-scatters where it
ends, in place of its all-reduces: no more bytes, fewer activations.
"""

from collections.abc import Mapping

from torch import nn

from vescale_parallel._plan.layers import Layer, Role, block_names, block_of


def sequence_boundaries(
    model: nn.Module, layers: Mapping[str, Layer], roles: Mapping[str, Role], axis: str
) -> dict[str, str]:
    """Return what happens at the boundaries of modules, by their names; "" for all others.

    Args:
        model: whose activations have their sequence in dim 1.
        layers: all layers.
        roles: of layers, and of parameters that are named themselves.
        axis: what shards features and sequences.
    """
    enter, leave = f"{axis}:full ->", f"-> {axis}:1"
    blocks = set(block_names(model))
    found = dict.fromkeys((name for name, _ in model.named_modules()), "")
    stacks = {name for name, one in model.named_parameters() if one.ndim > 2}
    columns: dict[str, list[Layer]] = {}
    for name, role in roles.items():
        layer = layers.get(name)
        if role is Role.REPLICATED:
            continue
        if layer is None:
            found |= _stack_boundary(name, axis) if name in stacks else {}
        elif role is Role.VOCABULARY or (role is Role.ROW and block_of(name, blocks)):
            found[name] = leave
        elif role is Role.COLUMN:
            columns.setdefault(layer.parent if block_of(name, blocks) else name, []).append(layer)
    for parent, members in columns.items():
        # Several that read the same: one gather for all of them, where their module begins.
        found[parent if len(members) > 1 else members[0].name] = enter
    return found


def _stack_boundary(name: str, axis: str) -> dict[str, str]:
    """Gather for the whole layer of experts, router included: it flattens batch and sequence."""
    owner = name.rpartition(".")[0].rpartition(".")[0]
    return {owner: f"{axis}:full -> {axis}:1"} if owner else {}
