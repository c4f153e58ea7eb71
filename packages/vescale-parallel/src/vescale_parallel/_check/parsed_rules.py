"""The rules of a plan, read: globs to layouts, before there is a model or a mesh.

`Plan` holds what a user wrote, as text that can be stored. `Rules` is the same, parsed; it is
what `check` resolves against a model. That order (text, rules, report) keeps imports one-way.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vescale_parallel._checkpoint.rules import CheckpointRules
from vescale_parallel._experts.rules import ExpertRules
from vescale_parallel._local_rows.resolve import globs_of
from vescale_parallel._notation.glob import expand_braces
from vescale_parallel._notation.layout import Boundary, RuleLayout, parse_boundary, parse_layout
from vescale_parallel._pipeline.plan.rules import AXIS, PipelineRules
from vescale_parallel._zero.rules import ZeroRules


@dataclass(frozen=True)
class Rules:
    """What a plan says, parsed.

    Attributes:
        parameters: glob over parameter names to layout, in the order that they are tried.
        activations: glob over module names to what happens at the module's boundary.
        batch: layout of the plain tensors that enter the root module, or None.
        axes: axes that a rule may name beyond those of the mesh, and the usual ones.
        zero: what is sharded beyond the layouts, see `ZeroRules`.
        checkpoint: what is computed again in backward.
        pipeline: how the model is divided into stages.
        experts: over which axes experts are sharded.
        local_rows: globs over modules that compute on each rank's own rows.
    """

    parameters: Mapping[str, RuleLayout]
    activations: Mapping[str, Boundary]
    batch: RuleLayout | None
    axes: tuple[str, ...]
    zero: ZeroRules
    checkpoint: CheckpointRules
    pipeline: PipelineRules
    experts: ExpertRules
    local_rows: tuple[str, ...]

    def axes_by_rule(self) -> dict[str, tuple[str, ...]]:
        """For each rule, in words, the axes that it names."""
        named = {f"parameters '{glob}': '{one}'": one.axes for glob, one in self.parameters.items()}
        for glob, boundary in self.activations.items():
            named[f"activations '{glob}': '{boundary.text}'"] = boundary.axes
        if self.batch is not None:
            named[f"batch '{self.batch}'"] = self.batch.axes
        if self.zero.is_used:
            named[f"zero.over '{self.zero.over}'"] = (self.zero.over,)
        if self.pipeline.is_used:
            named["pipeline"] = (AXIS,)
        for glob, axes in {"*": self.experts.axes, **self.experts.globs}.items():
            named[f"experts '{glob}'"] = axes
        return named


def parse_rules(
    parameters: Mapping[str, str],
    activations: Mapping[str, str],
    batch: str | None,
    axes: tuple[str, ...],
    zero: ZeroRules,
    checkpoint: CheckpointRules,
    pipeline: PipelineRules,
    experts: ExpertRules,
    local_rows: str | tuple[str, ...] | None,
) -> Rules:
    """Read every rule.

    Raises:
        PlanError: a glob or layout cannot be read; the message quotes the part that is wrong.
    """
    for glob in [*parameters, *activations]:
        # Braces that are not closed are found here; the alternatives themselves are not kept.
        expand_braces(glob)
    return Rules(
        parameters={glob: parse_layout(text) for glob, text in parameters.items()},
        activations={glob: parse_boundary(text) for glob, text in activations.items()},
        batch=None if batch is None else parse_layout(batch),
        axes=axes,
        zero=zero,
        checkpoint=checkpoint,
        pipeline=pipeline,
        experts=experts,
        local_rows=globs_of(local_rows),
    )
