"""The layout that a Hugging Face model declares, as roles of its layers and own parameters.

transformers need not be installed: everything is read from the model that the caller has. Only a
configuration without a model has to be built, by the library that it came from.
"""

import functools
import importlib
import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from vescale_parallel._errors import PlanError
from vescale_parallel._notation.layout import in_lowest_terms
from vescale_parallel._plan.layers import Blocks, Layer, Role, declared_name
from vescale_parallel._plan.styles import EXPERTS, role_of

_SLICED: Final = frozenset(("qkv_proj", "qkv"))
_GATHERED: Final = frozenset(("colwise_gather_output", "colwise_rep"))

_MAPPINGS: Final = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)
"""From configurations to models; asked in this order where no architecture is named."""


def model_of(model_or_config: Any) -> nn.Module:
    """Return the model itself, or one without values that is built from its configuration.

    Raises:
        PlanError: what was passed is neither, or its library cannot build it.
    """
    if isinstance(model_or_config, nn.Module):
        return model_or_config
    if not hasattr(model_or_config, "model_type"):
        raise PlanError(
            f"Plan.from_hf takes a model or a Hugging Face configuration, got "
            f"{type(model_or_config).__name__}. For a folder or a file: "
            "transformers.AutoConfig.from_pretrained(path)."
        )
    # The library of the configuration itself: this package imports none.
    library = importlib.import_module(type(model_or_config).__module__.partition(".")[0])
    named = getattr(model_or_config, "architectures", None) or []
    # Names and shapes are all that is read, so that nothing of a large model is allocated.
    with torch.device("meta"):
        for name in named if isinstance(named, list | tuple) else ():
            # A model whose code lies beside its checkpoint is not in the library; what else the
            # library has under a name (functions, trainers) is no architecture.
            kind = getattr(library, name, None) if isinstance(name, str) else None
            if isinstance(kind, type) and issubclass(kind, nn.Module):
                return _built(kind, model_or_config)
        return _automatic(library, model_or_config)


def _automatic(library: Any, config: Any) -> nn.Module:
    for name in _MAPPINGS:
        mapping = getattr(library, name, {})
        if type(config) in mapping:
            kind = mapping[type(config)]
            # Of some configurations there are several models, the usual one first.
            return _built(kind[0] if isinstance(kind, tuple) else kind, config)
    raise PlanError(
        f"no model class is known for {type(config).__name__}: set its 'architectures', or build "
        "the model, under torch.device('meta') where it is large, and pass that."
    )


def _built(kind: type[nn.Module], config: Any) -> nn.Module:
    try:
        return kind(config)
    except Exception as error:  # whatever a configuration of odd numbers makes of it
        line = " ".join(str(error).split())[:300]
        raise PlanError(
            f"{kind.__name__} cannot be built from its configuration: {type(error).__name__}: "
            f"{line}"
        ) from error


def declared_styles(model: nn.Module) -> dict[str, str]:
    """Return what the model and its configuration declare: name, `*` for indices, to style."""
    plan = getattr(model, "tp_plan", None)
    if isinstance(plan, Mapping):
        return dict(plan)
    # transformers before 5: the same, merged when a model is made, under another name.
    plan = getattr(model, "_tp_plan", None)
    if isinstance(plan, Mapping):
        return dict(plan)
    config = getattr(model, "config", None)
    prefix = getattr(model, "base_model_prefix", "")
    inside = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    plan = getattr(config, "base_model_tp_plan", None) or {}
    return {f"{inside}{name}": style for name, style in plan.items()}


def declared_blocks(model: nn.Module) -> str | None:
    """Return a glob for the blocks that a model's `base_model_pp_plan` names, or None.

    That plan lists the modules of the base model in their order, with the arguments and results
    that pass between them; the one that is a list holds the blocks, which stages divide.
    """
    config = getattr(model, "config", None)
    prefix = getattr(model, "base_model_prefix", "")
    inside = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    plan = getattr(config, "base_model_pp_plan", None) or {}
    lists = [
        f"{inside}{name}"
        for name in plan
        if isinstance(_module(model, f"{inside}{name}"), nn.ModuleList)
    ]
    # Several lists, as of an encoder and a decoder, are no single row of blocks.
    return f"{lists[0]}.*" if len(lists) == 1 else None


def declared_roles(model: nn.Module, styles: Mapping[str, str]) -> dict[str, Role]:
    """Return the roles that the styles give to modules and parameters of the model, by full name.

    Names that the model does not have are left out, as Hugging Face leaves them out: one
    configuration serves variants of a model. So are modules that only run hooks.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    # Styles name modules, and parameters where a module has a stack of them.
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found = {}
    for name in names:
        style = style_of(declared_name(name), styles)
        if style is None or style in EXPERTS:
            continue
        role = role_of(name, style)
        if role is not None:
            found[name] = _for_tables(model, name, role)
    return found


def style_of(name: str, styles: Mapping[str, str]) -> str | None:
    """Return the style that the first fitting entry gives a name; `*` in an entry is an index."""
    # The name itself before patterns: an entry that is written out is meant for this one.
    if name in styles:
        return styles[name]
    return next((style for entry, style in styles.items() if _fits(entry).fullmatch(name)), None)


@functools.lru_cache(maxsize=4096)
def _fits(entry: str) -> re.Pattern[str]:
    return re.compile(re.escape(entry).replace(r"\*", r"\d+"))


def _for_tables(model: nn.Module, name: str, role: Role) -> Role:
    # Of a table, "rowwise" means its rows, which are not inputs of a product.
    module = _module(model, name)
    return Role.VOCABULARY if role is Role.ROW and isinstance(module, nn.Embedding) else role


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None  # a parameter


def declared_blocks_of_heads(
    model: nn.Module, layers: Mapping[str, Layer], styles: Mapping[str, str]
) -> dict[str, Blocks]:
    """Return proportions of q, k and v for layers whose result the library gathers and then slices.

    That is what `colwise_gather_output` of such a layer says: q, k and v lie one behind the other.
    Head by head they would be as well sharded without a gather, as GPT-NeoX declares them.
    """
    found = {}
    for name, layer in layers.items():
        style = style_of(declared_name(name), styles) or ""
        if layer.own in _SLICED and style in _GATHERED:
            owner = _module(model, layer.parent)
            heads = _heads(getattr(owner, "config", None) or getattr(model, "config", None))
            if heads and layer.outputs % sum(heads) == 0:
                found[name] = in_lowest_terms(heads)
    return found


def _heads(config: Any) -> tuple[int, int, int] | None:
    # A model of pictures and text has the configuration of its text within its own.
    text = getattr(config, "get_text_config", lambda: config)()
    heads = getattr(text, "num_attention_heads", None)
    few = getattr(text, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(few, int) or min(heads, few) < 1:
        return None
    return heads, few, few


def stack_layouts(
    model: nn.Module, roles: Mapping[str, Role], styles: Mapping[str, str], axis: str
) -> dict[str, str]:
    """Return layouts of parameters that are named themselves, as stacks of experts are."""
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        dim = _stack_dim(roles.get(name), parameter.ndim)
        if style_of(declared_name(name), styles) in EXPERTS:
            dim = 0
        if dim is not None:
            found[name] = f"{axis}:{dim}"
    return found


def _stack_dim(role: Role | None, ndim: int) -> int | None:
    """Return the dim as `ColwiseParallel.shard_param` and its like choose it."""
    if role is Role.COLUMN:
        return max(ndim - 2, 0)
    if role is Role.ROW and ndim > 1:
        return ndim - 1
    return 0 if role is Role.VOCABULARY else None
