"""`Plan`: how a model lies over a mesh, as data.

A plan keeps the text that a user wrote. What the text means is parsed and resolved against a model
and a mesh in `_check`; nothing of a model or a process is needed to make a plan.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_dtensor import AttentionWay

from vescale_parallel._check.check import check_rules
from vescale_parallel._check.parsed_rules import Rules, parse_rules
from vescale_parallel._check.report import Report
from vescale_parallel._checkpoint.rules import parse_checkpoint
from vescale_parallel._common.mesh import AXES, mesh_sizes
from vescale_parallel._cost import Cluster
from vescale_parallel._cost.links import named_cluster
from vescale_parallel._errors import PlanError
from vescale_parallel._experts.rules import parse_experts
from vescale_parallel._invariant.resolve import InvariantWords, resolve_invariant
from vescale_parallel._pipeline.plan.rules import parse_pipeline, require_together
from vescale_parallel._pipeline.plan.schedule_choice import Own, require_text
from vescale_parallel._plan import presets
from vescale_parallel._plan.data import data_parallel
from vescale_parallel._plan.edit import join_sides, layout_text, merged, point_rule
from vescale_parallel._plan.fields import (
    Invariant,
    Pipeline,
    Zero,
    as_invariant,
    as_pipeline,
    as_zero,
    edited_fields,
    merged_fields,
    plan_fields,
    without_idle,
)
from vescale_parallel._plan.picture import report_svg
from vescale_parallel._plan.report_json import report_json
from vescale_parallel._plan.search import Candidate, Question, search
from vescale_parallel._plan.toml import read_toml, toml_of
from vescale_parallel._plan.words import copied_rules, require_batch, require_sequence
from vescale_parallel._schedules.actions import Schedule
from vescale_parallel._untrusted import parse_json
from vescale_parallel._zero.precision import spelled
from vescale_parallel._zero.rules import parse_zero


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Glob rules that say how parameters and activations lie over named mesh axes.

    A plan is data: it can be printed, compared, and stored as JSON. Rules are tried in the order
    they are written and the first match wins. The same plan runs on any mesh: what it says about
    an axis that the mesh does not have is left out, so `dp=4`, `tp=4` and one process share it. A
    typing error in an axis is still found: an axis must be usual, one of `axes`, or of the mesh.

    Attributes:
        parameters: glob over parameter names to layout, as `{"*.{q,k,v}.weight": "tp:0"}`. Axes
            that a layout does not name are replicated. Every parameter must match a rule; end
            with `"*": "replicate"` where the rest may be replicated. By default that is all.
        activations: glob over module names to `"in -> out"`, as `{"*.mlp": "tp:full -> tp:1"}`.
            Distributed tensors that enter the module are redistributed to `in`, those that leave
            it to `out`; an empty side, and axes that are not named, stay as they are. A side may
            name arguments by position or name, and results by position or key, and leaves the
            others alone: `"hidden_states = tp:full; 1 = tp:0 -> logits = tp:1"`; `*`: the rest.
        batch: layout of the plain tensors that enter the root module; every rank passes the whole
            batch and keeps its shard. Tensors without that dim stay replicated. None: leave alone.
        batch_is: "global": every rank passes the whole batch. "local": every rank passes its own
            rows, any number of them; the global batch is all of them in the order of the ranks.
        axes: names of axes, beside the usual ones, that rules may say and the mesh may lack.
        zero: what is sharded over the data-parallel axis besides, see `Zero`. A level alone will
            do: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters; or glob over
            parameter names to such a level, as `{"embed*": 1, "*": 3}`.
        precision: dtypes by their use, as `{"compute": "bfloat16", "reduce": "float32"}`, or glob
            over names of parameters and buffers to such a mapping. Parameters are cast to `compute`
            before they are sent, and modules compute with them in it; `zero` sums gradients in
            `reduce` (as `compute` where it is left out); parameters, their gradients and the states
            of optimizers are stored in `master`, and buffers of modules in `buffers`. What is left
            out keeps the dtype in which the model was built.
        checkpoint: what is computed again in backward, in place of being kept from forward: "full":
            each repeated block; a number n: every n-th of them; "selective": each, but results of
            matrix products, attention and convolutions are kept; "save: matmul, aten::topk": as
            that, for operators of your choice; "24GB": as many blocks as it takes for activations
            of a rank to stay below, by the estimate of `check`. Or glob over module names to one of
            "full", "selective", "save: ..." and "none"; of modules within others, the outermost.
        deterministic: `Invariant(shards=8)`, or "dp-invariant" for it: losses and parameters have
            the same bits on any number of ranks that share the batch.
        pipeline: how the model is divided into stages over the axis "pp", see `Pipeline`. A
            schedule alone will do, as "1f1b".
        microbatches: into how many `forward_backward` divides a batch, with stages or without.
            None: one, or as many as a schedule of your own has.
        experts: the axis, or axes as "dp, ep", over which experts are sharded: tokens are sent to
            the ranks that hold the experts which they chose. Or glob over module names to that, for
            modules that do not say by themselves that they hold experts. `batch` names it, too.
        local_rows: glob, or globs, over modules of which ranks compute their rows: `local_rows`.
        sequence: how attention runs where `batch` shards sequences: "ring", "ulysses" (rows are
            exchanged for heads), "gather" (of all keys), or "auto", the cheapest.

    Raises:
        PlanError: a glob or layout cannot be read; the message quotes the part that is wrong.

    Examples:
        >>> plan = Plan(parameters={"*.up.weight": "tp:0", "*": "replicate"}, zero=3)
        >>> Plan.from_json(plan.to_json()) == plan
        True
        >>> (plan | Plan(zero=Zero(prefetch=2))).zero == Zero(3, prefetch=2)
        True
    """

    parameters: Mapping[str, str] = field(default_factory=lambda: {"*": "replicate"})
    activations: Mapping[str, str] = field(default_factory=dict)
    batch: str | None = "dp:0"
    batch_is: Literal["global", "local"] = "global"
    axes: tuple[str, ...] = AXES
    zero: Zero | int | Mapping[str, int] = field(default_factory=Zero)
    precision: Mapping[str, Any] | None = None
    checkpoint: str | int | Mapping[str, str] | None = None
    deterministic: Invariant | Literal["dp-invariant"] | None = None
    pipeline: Pipeline | str | Path | Schedule | Own | None = None
    microbatches: int | None = None
    experts: str | Mapping[str, str] | None = None
    local_rows: str | tuple[str, ...] | None = None
    sequence: AttentionWay = "auto"

    def __post_init__(self) -> None:
        """Read every rule once, so that a plan that exists is a plan that can be read."""
        # The class is frozen: fields are set here only, before anyone has seen the plan.
        object.__setattr__(self, "parameters", copied_rules("parameters", self.parameters))
        object.__setattr__(self, "activations", copied_rules("activations", self.activations))
        # A list, as JSON has it, and a tuple make the same plan; a lone string would make letters.
        axes: object = self.axes
        if not isinstance(axes, list | tuple) or not all(isinstance(one, str) for one in axes):
            raise PlanError(f"plan axes: expected a tuple of names, got {axes!r}.")
        object.__setattr__(self, "axes", tuple(self.axes))
        for name in ("checkpoint", "experts"):
            if isinstance(getattr(self, name), Mapping):
                object.__setattr__(self, name, dict(getattr(self, name)))
        object.__setattr__(self, "precision", spelled(self.precision))
        object.__setattr__(self, "zero", as_zero(self.zero))
        object.__setattr__(self, "pipeline", as_pipeline(self.pipeline))
        object.__setattr__(self, "deterministic", as_invariant(self.deterministic))
        local_rows: object = self.local_rows
        if isinstance(local_rows, list):
            object.__setattr__(self, "local_rows", tuple(local_rows))
        require_batch(self.batch, self.batch_is)
        require_sequence(self.sequence, self.batch)
        # Reading is all that happens here; what it means for a model is for `check` to find out.
        self._parsed()

    def _parsed(self) -> Rules:
        # Not kept in a field: fields are what is compared, printed and stored. Reading is cached.
        return parse_rules(
            self.parameters,
            self.activations,
            self.batch,
            self.axes,
            parse_zero(as_zero(self.zero), self.precision),
            parse_checkpoint(self.checkpoint),
            parse_pipeline(as_pipeline(self.pipeline), self.microbatches),
            parse_experts(self.experts),
            self.local_rows,
        )

    def check(
        self, model: nn.Module, mesh_shape: Mapping[str, int] | DeviceMesh, *, inputs: Any = None
    ) -> Report:
        """Resolve the plan for a model and a mesh; needs no processes and reads only shapes.

        Args:
            model: may be on the meta device; of one that runs, the report has its static units.
            mesh_shape: a mesh, or its sizes by axis in mesh order, as `{"dp": 2, "tp": 2}`.
            inputs: as for `parallelize`.

        Raises:
            PlanError: with every problem that was found, not only the first.
        """
        report = check_rules(self._parsed(), model, mesh_shape, inputs)
        require_together(report, self.batch_is, self.deterministic)
        said = as_invariant(self.deterministic)
        words = InvariantWords(None if said is None else said.shards, self.batch_is)
        invariant = resolve_invariant(words, model, report)
        # Logical shards keep their gradients until the last of them: no reduction is ahead of it.
        changed: Any = {} if invariant is None else {"reduce_ahead": None, "invariant": invariant}
        return replace(report, batch_is=self.batch_is, sequence=self.sequence, **changed)

    def explain(
        self,
        model: nn.Module,
        mesh_shape: Mapping[str, int] | DeviceMesh,
        *,
        form: Literal["table", "json", "svg"] = "table",
        inputs: Any = None,
    ) -> str:
        """Print `check`: parameter, rule, layout, shapes, bytes; and return what was printed.

        Args:
            model: as for `check`.
            mesh_shape: as for `check`.
            form: a table, JSON for programs, or a picture of which coordinates hold which shards.
            inputs: as for `check`.
        """
        forms: dict[str, Callable[[Report], str]]
        forms = {"table": str, "json": report_json, "svg": report_svg}
        if form not in forms:
            raise PlanError(f"form {form!r}: a plan is explained as one of {list(forms)}.")
        text = forms[form](self.check(model, mesh_shape, inputs=inputs))
        print(text)
        return text

    @classmethod
    def from_hf(
        cls,
        model_or_config: Any,
        *,
        mesh: Mapping[str, int] | DeviceMesh | None = None,
        axis: str = "tp",
        sequence_parallel: bool = False,
        styles: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> "Plan":
        """Return the plan that a Hugging Face model declares, completed where it says nothing.

        What its `tp_plan` (`base_model_tp_plan` of the configuration) declares becomes rules.
        Tables of the vocabulary and heads over it are added, biases follow their weights, tied
        weights agree, and the rest is replicated. A model that declares nothing is read by the
        names and shapes of its layers, as by `for_decoder`. Logits stay sharded over the
        vocabulary, and so does the loss: `out.logits.full_tensor()` gathers them.

        Args:
            model_or_config: the model, on any device, also "meta"; or its configuration, of which
                a model without values is built.
            mesh: where it will run; keys and values with fewer heads than `axis` has ranks are
                replicated then. Without it the plan is the same for every mesh, and right.
            axis: the axis for tensor parallelism.
            sequence_parallel: whether activations between the layers are sharded over `axis` along
                dim 1; for models whose activations are (batch, sequence, features).
            styles: styles beside, or in place of, what the model declares, by its names with `*`
                for indices, as `{"model.layers.*.mlp.gate_proj": "colwise"}`.
            **fields: as of `with_`; a `pipeline` without stages takes the declared blocks.

        Raises:
            PlanError: a style that is declared is not known, or no model can be built.
        """
        ranks = None if mesh is None else mesh_sizes(mesh).get(axis, 1)
        draft = presets.from_hf(
            model_or_config,
            axis=axis,
            ranks=ranks,
            sequence_parallel=sequence_parallel,
            styles=styles,
        )
        plan = cls(**draft._asdict()).with_(**fields)
        stages = presets.with_declared_stages(model_or_config, plan.pipeline)
        return replace(plan, pipeline=stages)

    @classmethod
    def for_decoder(
        cls, model: nn.Module, *, axis: str = "tp", sequence_parallel: bool = False, **fields: Any
    ) -> "Plan":
        """Return the plan of a decoder, by the names and shapes of its layers.

        In each block (a member of an `nn.ModuleList`), matrices that lead away
        from the width of the model (q, k, v, gate, up, fc1, ...) are sharded by their outputs, and
        those that lead back (o, out, down, fc2, ...) by their inputs. The vocabulary's table and
        the head over it are sharded by rows. What is not recognised is replicated.

        Args:
            model: on any device, also "meta".
            axis: the axis for tensor parallelism.
            sequence_parallel: as for `from_hf`.
            **fields: as of `with_`: `zero=3`.

        Raises:
            PlanError: there are no such blocks, layers or tables.
        """
        return cls._by_shape(model, "for_decoder", axis, sequence_parallel, fields)

    @classmethod
    def for_encoder(
        cls, model: nn.Module, *, axis: str = "tp", sequence_parallel: bool = False, **fields: Any
    ) -> "Plan":
        """Do as `for_decoder`, for encoders: a table of a vocabulary is not required."""
        return cls._by_shape(model, "for_encoder", axis, sequence_parallel, fields)

    @classmethod
    def for_vit(
        cls, model: nn.Module, *, axis: str = "tp", sequence_parallel: bool = False, **fields: Any
    ) -> "Plan":
        """Do as `for_encoder`, for models of patches; their embedding and classifier are whole."""
        return cls._by_shape(model, "for_vit", axis, sequence_parallel, fields)

    @classmethod
    def _by_shape(
        cls, model: nn.Module, what: str, axis: str, sequence_parallel: bool, given: dict[str, Any]
    ) -> "Plan":
        draft = presets.by_shape(model, what=what, axis=axis, sequence_parallel=sequence_parallel)
        # What the caller says wins, also over rules of the preset.
        return cls(**draft._asdict()).with_(**given)

    @classmethod
    def data_parallel(
        cls,
        model: nn.Module,
        mesh: Mapping[str, int] | DeviceMesh,
        *,
        memory: float | None = None,
        **fields: Any,
    ) -> "Plan":
        """Return what is right for every model: the batch is sharded over all axes of the mesh.

        Args:
            model: on any device, also "meta".
            mesh: a mesh, or its sizes by axis in mesh order.
            memory: bytes of a device. Parameters, gradients and Adam's states are sharded (`zero`)
                as far as they have to be to fit into 60 % of it. None: not at all.
            **fields: as of `with_`: `prefetch=2`.
        """
        sizes = mesh_sizes(mesh)
        said = data_parallel(model, sizes, memory)
        plan = cls(**said).with_(**fields)
        # `Zero(3)` does not name the axis, and would shard nothing where "dp" is none.
        unnamed = as_zero(plan.zero).over == Zero().over not in sizes
        return plan.with_(over=said["zero"].over) if unnamed else plan

    @classmethod
    def search(
        cls,
        model: nn.Module,
        mesh: Mapping[str, int] | DeviceMesh,
        *,
        memory: float | None = None,
        batch: int | None = None,
        sequence: int = 4096,
        recompute: bool = False,
        cluster: str | Cluster = "h100",
        axis: str = "tp",
        say: Callable[[str], None] | None = None,
    ) -> "Plan":
        """Return the fastest plan that fits, by the cost model; nothing is run.

        Compared are data parallelism over all axes, and where the mesh has `axis` the layouts of
        `from_hf` (or of `for_encoder`) with and without sequence parallelism, each with ZeRO 0 to
        3, and each of these with `checkpoint` None, "selective" and "full". Data parallelism is
        among them, so nothing is chosen that is estimated to be slower.

        Args:
            model: on any device, also "meta".
            mesh: a mesh, or its sizes by axis in mesh order.
            memory: bytes of a device; None: that of the cluster.
            batch: sequences of the global batch; None: one for each rank.
            sequence: tokens of a sequence.
            recompute: whether the model itself computes its blocks again, without `checkpoint`.
            cluster: a name in `cost.CLUSTERS`, or one of your own.
            axis: the axis for tensor parallelism.
            say: is given the table of all candidates, as by `say=print`.

        Raises:
            PlanError: none fits; the message has the table.
        """
        sizes = mesh_sizes(mesh)
        where = named_cluster(cluster)
        question = Question(
            sizes=sizes,
            batch=math.prod(sizes.values()) if batch is None else batch,
            sequence=sequence,
            recompute=recompute,
            cluster=where if memory is None else replace(where, memory=memory),
        )
        plan, text = search(model, cls._layouts(model, sizes, axis), question)
        if say is not None:
            say(text)
        return plan

    @classmethod
    def _layouts(
        cls, model: nn.Module, sizes: Mapping[str, int], axis: str
    ) -> "list[Candidate[Plan]]":
        found = [Candidate("data parallel", cls.data_parallel(model, sizes))]
        if sizes.get(axis, 1) == 1:
            return found
        make: Any = cls.from_hf if hasattr(model, "config") else cls.for_encoder
        with suppress(PlanError):  # a model that no preset recognises is data parallel
            for sequence_parallel in (False, True):
                plan = make(model, axis=axis, sequence_parallel=sequence_parallel)
                name = f"{axis} + sequence parallel" if sequence_parallel else axis
                found.append(Candidate(name, plan, sequence_parallel))
        return found

    def with_(self, **fields: Any) -> "Plan":
        """Return the plan with other values of these fields; `|` merges rules instead.

        Fields of `Zero`, `Pipeline` and `Invariant` are named by themselves, and change nothing
        beside them: `with_(over="replica", chunks=4)`. So do a level or a schedule alone, as
        `zero=3` or `pipeline="zbv"`: the rest of that field stays. `zero=Zero(3)` replaces it all.

        Raises:
            PlanError: there is no such field, or the plan that comes of it cannot be read.
        """
        return replace(self, **edited_fields(self, fields))

    def __or__(self, other: "Plan") -> "Plan":
        """Return both plans' rules, those of `other` first, so that they win; `"*"` stays the last.

        Of the other fields, those of `other` that are not at their default win; what is at its
        default it does not say, as a plan of rules alone. Of `Zero`, `Pipeline` and `Invariant`
        that holds field by field: `Plan(zero=3) | Plan(zero=Zero(over="replica"))` has both. Of a
        pipeline and `deterministic` with defaults alone, the schedule and the shards win. Other
        mappings, as levels by glob, are replaced as a whole.
        """
        if not isinstance(other, Plan):
            return NotImplemented
        changed = merged_fields(self, other)
        for name in {"parameters", "activations"} & set(changed):
            changed[name] = merged(getattr(self, name), changed[name])
        return replace(self, **changed)

    def shard(
        self,
        pattern: str,
        placement: object,
        axis: str,
        *,
        phase: Literal["init", "run"] = "init",
    ) -> "Plan":
        """Return the plan with one rule more, before the others: a placement over one axis.

        Args:
            pattern: glob over names of parameters, or in phase "run" an activation as `annotate`
                takes it.
            placement: a dim, `Shard(dim)` or `Replicate()`.
            axis: the mesh axis.
            phase: "init" places parameters, "run" activations.
        """
        layout = layout_text(placement, axis)
        if phase == "run":
            return self.annotate(pattern, layout)
        if phase != "init":
            raise PlanError(f"phase {phase!r}: 'init' places parameters, 'run' activations.")
        return replace(self, parameters=merged(self.parameters, {pattern: layout}))

    def annotate(self, point: str, placement: str) -> "Plan":
        """Return a plan with an activation's layout: `"*.mlp:in"`, `"*.mlp:out"`, `"*.mlp"`.

        Without `:in` it is what leaves the module. A rule about the other side of it is kept.
        """
        module, rule = point_rule(point, placement)
        text = join_sides(self.activations.get(module), rule)
        return replace(self, activations=merged(self.activations, {module: text}))

    def redistribute(self, point: str, src: str, dst: str) -> "Plan":
        """Return the plan in which the module `point` is entered as `src` and left as `dst`."""
        rule = {point: f"{src} -> {dst}"}
        return replace(self, activations=merged(self.activations, rule))

    def to_json(self) -> str:
        """Return the plan as JSON text; the order of the rules is kept."""
        return json.dumps(asdict(require_text(self)), indent=2)

    def to_toml(self) -> str:
        """Return the plan as TOML text; the order of the rules is kept, and None is `false`."""
        return toml_of(without_idle(self, asdict(require_text(self))))

    @classmethod
    def from_toml(cls, text: str) -> "Plan":
        """Read what `to_toml` wrote.

        Raises:
            PlanError: the text is not TOML, or holds something that is not part of a plan.
        """
        return cls(**plan_fields(read_toml(text), "TOML", [one.name for one in fields(cls)]))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read what `to_json` wrote.

        Raises:
            PlanError: the text is not JSON, or holds something that is not part of a plan.
        """
        try:
            content: Any = parse_json(text)
        except ValueError as error:
            raise PlanError(f"a plan as JSON cannot be read: {str(error)[:300]}") from error
        return cls(**plan_fields(content, "JSON", [one.name for one in fields(cls)]))
