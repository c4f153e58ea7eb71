"""Roles of layers by their names and shapes, for models that declare no layout.

Only the matrices inside of repeated blocks, the vocabulary and the head over it are sharded; what
is not recognised is replicated, which is always right.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from torch import nn

from vescale_parallel._plan.layers import Layer, Role, block_names, block_of, layers_of

_COLUMN = (
    "q k v q_proj k_proj v_proj query key value query_proj key_proj value_proj q_lin k_lin v_lin "
    "qkv qkv_proj query_key_value Wqkv wqkv wq wk wv c_attn q_attn to_q to_k to_v gate up "
    "gate_proj up_proj gate_up_proj fc1 fc_in c_fc w1 w3 wi wi_0 wi_1 lin1 linear1 dense_h_to_4h "
    "ffn Wi intermediate_dense"
)
_ROW = (
    "o o_proj out out_proj down down_proj fc2 fc_out c_proj w2 wo Wo lin2 out_lin linear2 "
    "dense_4h_to_h ffn_output output_dense to_out"
)
COLUMN_NAMES: Final = frozenset(_COLUMN.split())
ROW_NAMES: Final = frozenset(_ROW.split())
_AWAY: Final = ("pos", "type", "segment", "relative", "bucket")
"""Parts of names of embeddings that look up something else than a vocabulary."""


def roles_by_shape(model: nn.Module) -> dict[str, Role]:
    """Return the role of every layer that shall not be replicated, by the name of its module."""
    layers = layers_of(model)
    blocks = set(block_names(model))
    inside: dict[str, list[Layer]] = {}
    for name, layer in layers.items():
        block = block_of(name, blocks)
        if block is not None and not layer.embeds:
            inside.setdefault(block, []).append(layer)
    found: dict[str, Role] = {}
    for members in inside.values():
        found |= _roles_in_block(model, members)
    found |= _roles_of_biases(layers, blocks, found)
    return found | vocabulary_roles(layers, found)


def _roles_in_block(model: nn.Module, members: list[Layer]) -> dict[str, Role]:
    width = _width(members)
    by_parent: dict[str, set[str]] = {}
    for layer in members:
        by_parent.setdefault(layer.parent, set()).add(layer.own)
    found = {}
    for layer in members:
        role = _role(layer, width, by_parent[layer.parent])
        if role is not None and not _computes_more(model.get_submodule(layer.parent)):
            found[layer.name] = role
    return found


def _roles_of_biases(
    layers: Mapping[str, Layer], blocks: set[str], known: Mapping[str, Role]
) -> dict[str, Role]:
    """Return roles of tables that bias attention by head, as heads are sharded beside them."""
    attentions = {layers[name].parent for name, role in known.items() if role is Role.COLUMN}
    return {
        name: Role.FEATURES
        for name, one in layers.items()
        if one.embeds and "relative" in one.own and "bias" in one.own
        if one.parent in attentions and block_of(name, blocks) is not None
    }


def _width(members: Iterable[Layer]) -> int:
    """Return the features between layers: what most of the matrices of a block read or write."""
    sizes = Counter(size for one in members for size in (one.inputs, one.outputs))
    # `most_common` keeps the order of the model where sizes are equally frequent.
    return sizes.most_common(1)[0][0]


def _role(layer: Layer, width: int, siblings: set[str]) -> Role | None:
    if layer.own == "gate" and not siblings & {"up", "w1", "fc1"}:
        return None  # a router: one output for each expert
    # Names first: the shape of a square matrix does not tell in which direction it leads.
    if layer.own in COLUMN_NAMES or layer.parent.endswith("intermediate"):
        return Role.COLUMN
    if layer.own in ROW_NAMES:
        return Role.ROW
    if layer.inputs != layer.outputs and width in (layer.inputs, layer.outputs):
        # Narrow ones (adapters, latent projections, routers) are not worth a collective.
        narrow = min(layer.inputs, layer.outputs) * 2 < width
        role = Role.COLUMN if layer.inputs == width else Role.ROW
        return None if narrow else role
    # BERT and its kin call the projection behind attention `dense`, vision models `proj`; being
    # square, it has no shape that tells.
    return Role.ROW if layer.own in ("dense", "proj") and layer.inputs == layer.outputs else None


def _computes_more(parent: nn.Module) -> bool:
    """Return whether a module does more than products: recurrences, convolutions by features.

    Their kernels want all features, or other splits of them than heads.
    """
    own = [
        name
        for name, one in parent.named_parameters(recurse=False)
        if one.ndim and "bias" not in name
    ]
    return bool(own) or any("Conv" in type(one).__name__ for one in _unlinear(parent))


def _unlinear(parent: nn.Module) -> list[nn.Module]:
    return [one for one in parent.children() if type(one).__name__ != "Conv1D"]


def vocabulary_roles(layers: Mapping[str, Layer], known: Mapping[str, Role]) -> dict[str, Role]:
    """Return roles of the embeddings of the vocabulary, and of the heads that score it."""
    tables = [
        one
        for one in layers.values()
        if one.embeds and not any(word in one.own.lower() for word in _AWAY)
    ]
    # Tables of other things (tokens of images, speakers) have fewer rows, and are replicated.
    rows = max((one.inputs for one in tables), default=0)
    found = {one.name: Role.VOCABULARY for one in tables if one.inputs == rows}
    for name, one in layers.items():
        # A head is told by its outputs, of which there are as many as words.
        if rows and not one.embeds and one.outputs == rows and name not in known:
            found[name] = Role.COLUMN
    return found
