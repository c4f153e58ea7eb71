"""Modules with weights as presets see them, and the roles that tensor parallelism knows."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from torch import nn

from vescale_parallel._notation.layout import blocks_text

_ADAPTED: Final = ".base_layer"
"""Where adapters (PEFT's LoRA) keep the layer that they wrap."""
_ADAPTED_MODEL: Final = "base_model.model."
"""Where they keep the model."""


def declared_name(name: str) -> str:
    """Return the name that a layer or parameter had before adapters were added."""
    return name.removeprefix(_ADAPTED_MODEL).replace(f"{_ADAPTED}.", ".").removesuffix(_ADAPTED)


class Role(Enum):
    """What a layer is to tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3)."""

    COLUMN = "its outputs are sharded"
    ROW = "its inputs are sharded, its outputs are partial sums"
    VOCABULARY = "its rows are the vocabulary"
    FEATURES = "an embedding whose features are sharded"
    REPLICATED = "every rank holds all of it"


@dataclass(frozen=True)
class Layer:
    """A module that multiplies or looks up.

    Attributes:
        name: of the module.
        inputs, outputs: features; of an embedding, rows and features.
        out_dim: dim of the weight that makes the outputs; 1 where the weight is transposed.
        embeds: whether it is an embedding.
    """

    name: str
    inputs: int
    outputs: int
    out_dim: int = 0
    embeds: bool = False

    @property
    def own(self) -> str:
        """The last part of the name; that of the adapted layer where an adapter wraps it."""
        return self._plain.rpartition(".")[2]

    @property
    def parent(self) -> str:
        """The name of the module that holds it."""
        return self._plain.rpartition(".")[0]

    @property
    def _plain(self) -> str:
        return self.name.removesuffix(_ADAPTED)


def layer_of(name: str, module: nn.Module) -> Layer | None:
    """Return the layer that a module is, or None."""
    if isinstance(module, nn.Embedding):
        return Layer(name, module.num_embeddings, module.embedding_dim, embeds=True)
    if isinstance(module, nn.Linear):
        return Layer(name, module.in_features, module.out_features)
    weight = getattr(module, "weight", None)
    # Hugging Face's GPT-2 keeps its matrices transposed, in a class that torch does not have.
    if type(module).__name__ == "Conv1D" and isinstance(weight, nn.Parameter) and weight.ndim == 2:
        return Layer(name, weight.shape[0], weight.shape[1], out_dim=1)
    return None


def layers_of(model: nn.Module) -> dict[str, Layer]:
    """Return all layers by the name of their module, in the order of the model."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        layer = layer_of(name, module)
        if layer is not None:
            found[name] = layer
    return found


def looked_up(model: nn.Module) -> str:
    """Return a glob for the tables that are looked up, whatever they are called."""
    tables = [name for name, one in model.named_modules() if isinstance(one, nn.Embedding)]
    # Without tables the glob of an empty name, which no parameter has.
    return "{" + ",".join(f"{name}.weight" for name in tables) + "}"


def block_names(model: nn.Module) -> list[str]:
    """Return names of blocks: members of a model's lists, which hybrids make of two types."""
    return [
        f"{name}.{index}" if name else index
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for index, _ in module.named_children()
    ]


def block_of(name: str, blocks: set[str]) -> str | None:
    """Return the outermost block that a module lies in, or None."""
    return next((outer for outer in _prefixes(name) if outer in blocks), None)


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


_THREE: Final = frozenset(("c_attn", "qkv", "Wqkv"))
"""Names of projections to q, k and v, one after the other, where these are equally wide."""
_TWO: Final = frozenset(("gate_up_proj", "gate_up", "Wi"))
"""Names of projections to a gate and what it gates."""


Blocks = tuple[int, ...]
"""Proportions of matrices that a layer has side by side; one number if it is one matrix."""


def merged_blocks(layer: Layer) -> Blocks:
    """Return the proportions of the matrices that a layer has side by side, used one by one.

    Sharded as one matrix, a rank would hold all of the first and none of the last, and each use
    would send it. Those that go head by head (GPT-NeoX's query_key_value), or by groups of
    heads (CodeGen's qkv_proj), are one matrix.
    """
    # Of others (GPT-BigCode) a c_attn that is no Conv1D goes head by head.
    by_head = layer.own == "c_attn" and layer.out_dim == 0
    if layer.own in _THREE and layer.outputs == 3 * layer.inputs and not by_head:
        return (1, 1, 1)
    return (1, 1) if layer.own in _TWO and layer.outputs % 2 == 0 else (1,)


def parameter_layouts(
    layer: Layer, module: nn.Module, role: Role, axis: str, blocks: Blocks | None = None
) -> dict[str, str]:
    """Return the layout of each own parameter of a layer in that role, by its full name.

    Args:
        layer: which one.
        module: the same.
        role: what its parameters are to tensor parallelism.
        axis: that shards them.
        blocks: matrices that are known to lie side by side; None goes by the layer's name.
    """
    dims = {
        Role.COLUMN: layer.out_dim,
        Role.ROW: 1 - layer.out_dim,
        Role.VOCABULARY: 0,
        Role.FEATURES: 1,
    }
    if role is not Role.COLUMN:
        blocks = (1,)
    elif blocks is None:
        blocks = merged_blocks(layer)
    found = {}
    for name, parameter in module.named_parameters(recurse=False):
        dim = dims.get(role)
        if parameter.ndim == 1:
            # A bias belongs to the outputs, which are whole behind a row-parallel layer.
            dim = 0 if role in (Role.COLUMN, Role.VOCABULARY) else None
        if dim is not None:
            found[f"{layer.name}.{name}"] = f"{axis}:{dim}{blocks_text(blocks)}"
    return found
