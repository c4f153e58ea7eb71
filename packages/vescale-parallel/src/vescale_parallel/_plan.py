"""`Plan`: how a model lies over a mesh, as data.

A plan keeps the text that a user wrote. What the text means is parsed in `_rules` and resolved
against a model and a mesh in `_check`; nothing of a model or a process is needed to make a plan.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._check import check_rules
from vescale_parallel._errors import PlanError
from vescale_parallel._mesh import AXES
from vescale_parallel._messages import did_you_mean
from vescale_parallel._report import Report
from vescale_parallel._rules import Rules, parse_rules
from vescale_parallel._zero.rules import parse_zero


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Glob rules that say how parameters and activations lie over named mesh axes.

    A plan is data: it can be printed, compared, and stored as JSON. Rules are tried in the order
    they are written and the first match wins. The same plan runs on any mesh: what it says about
    an axis that the mesh does not have is left out, so `dp=4`, `tp=4` and one process share it. A
    typing error in an axis is still found: an axis must be one of `axes`, or of the mesh.

    Attributes:
        parameters: glob over parameter names to layout, as `{"*.{q,k,v}.weight": "tp:0"}`. Axes
            that a layout does not name are replicated. Every parameter must match a rule; end
            with `"*": "replicate"` where the rest may be replicated.
        activations: glob over module names to `"in -> out"`, as `{"*.mlp": "tp:full -> tp:1"}`.
            Distributed tensors that enter the module are redistributed to `in`, those that leave
            it to `out`; an empty side, and axes that are not named, stay as they are.
        batch: layout of the plain tensors that enter the root module; every rank passes the whole
            batch and keeps its shard. Tensors without that dim stay replicated. None: leave alone.
        axes: the axes the plan is written for, beyond those of the mesh at hand.
        zero: what is sharded over the axis `over` besides: 0 nothing, 1 optimizer states, 2 and
            gradients, 3 and parameters. Or glob over parameter names to such a level, as
            `{"embed*": 1, "*": 3}`.
        over: the axis that `zero` shards over. Another axis that the batch is sharded over then
            only replicates (HSDP): `Plan(batch="replica:0, dp:0", zero=3, over="dp", ...)`.
        units: glob, or globs, over names of modules whose parameters are gathered as one. None: the
            repeated blocks of the model (the members of a list of one type), and the rest.
        prefetch: how many units are gathered ahead of the one that computes.

    Raises:
        PlanError: a glob or layout cannot be read; the message quotes the part that is wrong.

    Example:
        >>> plan = Plan(parameters={"*.up.weight": "tp:0", "*": "replicate"})
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    parameters: Mapping[str, str]
    activations: Mapping[str, str] = field(default_factory=dict)
    batch: str | None = "dp:0"
    axes: tuple[str, ...] = AXES
    zero: int | Mapping[str, int] = 0
    over: str = "dp"
    units: str | tuple[str, ...] | None = None
    prefetch: int = 1

    def __post_init__(self) -> None:
        """Read every rule once, so that a plan that exists is a plan that can be read."""
        # The class is frozen: fields are set here only, before anyone has seen the plan.
        object.__setattr__(self, "parameters", _rules("parameters", self.parameters))
        object.__setattr__(self, "activations", _rules("activations", self.activations))
        # A list, as JSON has it, and a tuple make the same plan; a lone string would make letters.
        axes: object = self.axes
        if isinstance(axes, str) or not all(isinstance(axis, str) for axis in self.axes):
            raise PlanError(f"plan axes: expected a tuple of names, got {axes!r}.")
        object.__setattr__(self, "axes", tuple(self.axes))
        if isinstance(self.zero, Mapping):
            object.__setattr__(self, "zero", dict(self.zero))
        # As for `axes`: JSON has lists, and a list makes the same plan.
        units: object = self.units
        if isinstance(units, list):
            object.__setattr__(self, "units", tuple(units))
        # Reading is all that happens here; what it means for a model is for `check` to find out.
        self._parsed()

    def _parsed(self) -> Rules:
        # Not kept in a field: fields are what is compared, printed and stored. Reading is cached.
        zero = parse_zero(self.zero, self.over, self.units, self.prefetch)
        return parse_rules(self.parameters, self.activations, self.batch, self.axes, zero)

    def check(self, model: nn.Module, mesh_shape: Mapping[str, int] | DeviceMesh) -> Report:
        """Resolve the plan for a model and a mesh; needs no processes and reads only shapes.

        Args:
            model: the model; its parameters may be on the meta device.
            mesh_shape: a mesh, or its sizes by axis in mesh order, as `{"dp": 2, "tp": 2}`.

        Raises:
            PlanError: with every problem that was found, not only the first.
        """
        return check_rules(self._parsed(), model, mesh_shape)

    def explain(self, model: nn.Module, mesh_shape: Mapping[str, int] | DeviceMesh) -> str:
        """Print the table of `check`: parameter, rule, layout, shapes, bytes; and return it."""
        text = str(self.check(model, mesh_shape))
        print(text)
        return text

    def to_json(self) -> str:
        """The plan as JSON text; the order of the rules is kept."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read what `to_json` wrote.

        Raises:
            PlanError: the text is not JSON, or holds something that is not part of a plan.
        """
        try:
            content: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"a plan as JSON cannot be read: {error}") from error
        known = [one.name for one in fields(cls)]
        if not isinstance(content, dict) or "parameters" not in content:
            raise PlanError(f"a plan as JSON is an object with the keys {known}.")
        for name in content:
            if name not in known:
                raise PlanError(
                    f"a plan has no '{name}'.{did_you_mean(name, known)} It has {known}."
                )
        return cls(**content)


def _rules(what: str, rules: Mapping[str, str]) -> dict[str, str]:
    """A copy of the rules, so that editing the caller's mapping does not edit the plan."""
    if not isinstance(rules, Mapping):
        raise PlanError(
            f"plan {what}: expected a mapping of glob to layout, got {type(rules).__name__}."
        )
    for glob in rules:
        if not isinstance(glob, str):
            raise PlanError(f"plan {what}: a glob is a string, got {glob!r}.")
    return dict(rules)
