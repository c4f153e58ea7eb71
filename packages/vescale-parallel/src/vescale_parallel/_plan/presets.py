"""Writes the rules of a preset for a model: its parameters, and its activations."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from vescale_parallel._errors import PlanError
from vescale_parallel._plan.by_shape import roles_by_shape, vocabulary_roles
from vescale_parallel._plan.declared_layout import (
    declared_blocks,
    declared_blocks_of_heads,
    declared_roles,
    declared_styles,
    model_of,
    stack_layouts,
)
from vescale_parallel._plan.fields import Pipeline, as_pipeline
from vescale_parallel._plan.globs import rules_of
from vescale_parallel._plan.layers import (
    Blocks,
    Layer,
    Role,
    block_names,
    layers_of,
    parameter_layouts,
)
from vescale_parallel._plan.sequence import sequence_boundaries

_KEYS_AND_VALUES = {
    "k",
    "v",
    "k_proj",
    "v_proj",
    "key",
    "value",
    "key_proj",
    "value_proj",
    "wk",
    "wv",
}


class Draft(NamedTuple):
    """The rules of a preset, as `Plan` takes them."""

    parameters: dict[str, str]
    activations: dict[str, str]


def from_hf(
    model_or_config: Any,
    *,
    axis: str,
    ranks: int | None,
    sequence_parallel: bool,
    styles: Mapping[str, str] | None,
) -> Draft:
    """Return rules for a Hugging Face model, see `Plan.from_hf`."""
    model = model_of(model_or_config)
    given = dict(styles or {})
    # The caller's come first: of two entries that fit a name, the first is taken.
    declared = {**given, **{n: s for n, s in declared_styles(model).items() if n not in given}}
    roles = declared_roles(model, declared)
    # What is declared for blocks is what their author wants there, also where it says nothing;
    # tables and heads are declared in some versions of the library only.
    layers = layers_of(model)
    roles = {**vocabulary_roles(layers, roles), **roles} if roles else roles_by_shape(model)
    # After all roles are known, declared or found: it takes some away.
    _replicate_few_heads(model, layers, roles, ranks)
    stacks = stack_layouts(model, roles, declared, axis)
    merged = declared_blocks_of_heads(model, layers, declared)
    return _draft(model, layers, roles, stacks, axis, sequence_parallel, merged)


def with_declared_stages(model_or_config: Any, said: Any) -> Pipeline | None:
    """Return a plan's pipeline, with the blocks that the model declares where it names none.

    The arguments and results that a `base_model_pp_plan` names too are found by running.
    """
    pipeline = as_pipeline(said)
    if pipeline is None or pipeline.stages is not None:
        return pipeline
    return replace(pipeline, stages=declared_blocks(model_of(model_or_config)))


def by_shape(model: nn.Module, *, what: str, axis: str, sequence_parallel: bool) -> Draft:
    """Return rules for a model that declares nothing, see `Plan.for_decoder` and its like."""
    roles = roles_by_shape(model)
    _require(model, roles, what)
    return _draft(model, layers_of(model), roles, {}, axis, sequence_parallel)


def _require(model: nn.Module, roles: Mapping[str, Role], what: str) -> None:
    """Refuse a model of which a preset shards nothing: it is not of the kind that was named."""
    name = type(model).__name__
    if not block_names(model):
        raise PlanError(
            f"Plan.{what}: {name} has no blocks, which are the members of an nn.ModuleList. Write"
            " its rules: Plan(parameters={glob: 'tp:0', '*': 'replicate'})."
        )
    if Role.ROW not in roles.values():
        raise PlanError(
            f"Plan.{what}: in the blocks of {name} no layer is recognised that leads back to the "
            "width of the model (as o_proj, out, down_proj, fc2). Write its rules: "
            "Plan(parameters={glob: 'tp:0', glob: 'tp:1', '*': 'replicate'})."
        )
    if what == "for_decoder" and Role.VOCABULARY not in roles.values():
        raise PlanError(
            f"Plan.for_decoder: {name} has no nn.Embedding of a vocabulary. For a model of pictures"
            " or features: Plan.for_vit, Plan.for_encoder."
        )


def _replicate_few_heads(
    model: nn.Module, layers: Mapping[str, Layer], roles: dict[str, Role], ranks: int | None
) -> None:
    """Keep keys and values of fewer heads than ranks on all ranks: a head is not shared."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    heads = getattr(text, "num_key_value_heads", None)
    if ranks is None or not isinstance(heads, int) or heads % ranks == 0:
        return
    for name in roles:
        # Of more heads than ranks, which do not divide them, shards are uneven and right.
        if name in layers and layers[name].own in _KEYS_AND_VALUES and heads < ranks:
            roles[name] = Role.REPLICATED


def _draft(
    model: nn.Module,
    layers: Mapping[str, Layer],
    roles: Mapping[str, Role],
    stacks: Mapping[str, str],
    axis: str,
    sequence_parallel: bool,
    merged: Mapping[str, Blocks] | None = None,
) -> Draft:
    layouts = dict.fromkeys(
        (name for name, _ in model.named_parameters(remove_duplicate=False)), "replicate"
    )
    for name, role in roles.items():
        if name in layers:
            blocks = (merged or {}).get(name)
            module = model.get_submodule(name)
            layouts |= parameter_layouts(layers[name], module, role, axis, blocks)
    # Last, as parameters that are named themselves are told more exactly than their layers.
    layouts |= stacks
    _agree_on_ties(model, layouts)
    boundaries = sequence_boundaries(model, layers, roles, axis) if sequence_parallel else {}
    return Draft(rules_of(layouts, "replicate"), rules_of(boundaries, None))


def _agree_on_ties(model: nn.Module, layouts: dict[str, str]) -> None:
    """Give a parameter with several names the layout of the first that is sharded."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    # A parameter is one tensor: rules of its names that differ would be refused by `check`.
    for shared in names.values():
        sharded = [layouts[name] for name in shared if layouts[name] != "replicate"]
        layouts.update(dict.fromkeys(shared, sharded[0] if sharded else "replicate"))
