"""ZeRO's rules resolved for a model: the level of each parameter, and the flat buffers they make.

Nothing is allocated: shapes, names and mesh sizes decide everything, so all ranks find the same.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vescale_parallel._glob import first_match
from vescale_parallel._messages import count, human_bytes, listed, table
from vescale_parallel._report_rows import ParameterRow
from vescale_parallel._zero.flat_plan import FlatPlan, Wanted, plan_flat
from vescale_parallel._zero.rules import LEVELS, ZeroRules
from vescale_parallel._zero.units import ROOT, unit_names, unit_of

_ALIGNMENT_BYTES = 16
"""Where tensors begin in a buffer: what vectorised kernels and collectives load at once."""


@dataclass(frozen=True)
class BufferRow:
    """One flat buffer: the parameters of one unit with the same level, dtype and requires_grad.

    Attributes:
        unit: name of the module that is gathered as one; "" is the model itself.
        zero: the level, 1 to 3.
        dtype: of the elements.
        trainable: whether its parameters require a gradient when the model is parallelised.
        plan: where they lie and who owns what.
        compute: dtype of the gathered values.
        reduce: dtype in which gradients are summed.
    """

    unit: str
    zero: int
    dtype: torch.dtype
    trainable: bool
    plan: FlatPlan
    compute: torch.dtype
    reduce: torch.dtype

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered buffer."""
        return self.plan.total * self.compute.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes that one rank owns: also of each optimizer state in this dtype."""
        return self.plan.piece * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes that stay between steps."""
        if self.zero == 3:
            return self.shard_bytes
        # In one dtype the shard is a slice of what is gathered.
        apart = self.shard_bytes if self.compute != self.dtype else 0
        return self.gathered_bytes + apart

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that stay until they are set to None."""
        if not self.trainable:
            return 0
        # At level 1 the buffer that the reduce-scatter reads is kept beside its result.
        packed = self.plan.total * self.reduce.itemsize
        return self.shard_bytes + (packed if self.zero == 1 else 0)


def levels_of(
    rules: ZeroRules, rows: Sequence[ParameterRow], sizes: Mapping[str, int]
) -> tuple[dict[str, int], list[str]]:
    """The level of each parameter by its first name, and what is wrong with the rules."""
    if not rules.is_used:
        return {}, []
    found, problems = {}, []
    for row in rows:
        globs = [glob for name in row.names if (glob := first_match(rules.levels, name))]
        levels = {rules.levels[glob] for glob in globs}
        if len(levels) > 1:
            problems.append(
                f"{listed(row.names)} are one parameter, and zero rules {listed(globs)} give it "
                f"different levels ({listed(sorted(levels))}). Give its names one level."
            )
            continue
        # What no rule covers is not sharded: level 0 is what a plan without `zero` says.
        level = levels.pop() if levels else 0
        if level and row.layout.dim_of(rules.over, len(row.global_shape)) is not None:
            problems.append(
                f"parameter '{row.name}': rule '{row.rule}' shards it over '{rules.over}' "
                f"('{row.layout}'), and zero={level} would shard it over '{rules.over}' again. "
                f"Shard over another axis, or give it zero level 0."
            )
        # A scalar has no dim to shard, and an axis of one rank has nothing to share with.
        shards = sizes.get(rules.over, 1) > 1 and math.prod(row.global_shape) > 0
        found[row.name] = level if shards and row.global_shape else 0
    return found, problems


def buffers_of(
    rules: ZeroRules, model: nn.Module, rows: Sequence[ParameterRow], sizes: Mapping[str, int]
) -> tuple[BufferRow, ...]:
    """The flat buffers, unit by unit in the order of the model."""
    if not any(row.zero for row in rows):
        return ()
    units = unit_names(model, rules.units)
    groups: dict[tuple[str, int, torch.dtype, bool], list[Wanted]] = {}
    for row in rows:
        if row.zero:
            parameter = model.get_parameter(row.name)
            kind = (unit_of(row.names, units), row.zero, parameter.dtype, parameter.requires_grad)
            groups.setdefault(kind, []).append(_wanted(row))
    shards = sizes[rules.over]
    made = {
        kind: plan_flat(wanted, shards, max(1, _ALIGNMENT_BYTES // kind[2].itemsize))
        for kind, wanted in groups.items()
    }
    ordered = sorted(made.items(), key=lambda item: units.index(item[0][0]))
    return tuple(BufferRow(*kind, plan, *dtypes_of(rules, kind[2])) for kind, plan in ordered)


def dtypes_of(rules: ZeroRules, stored: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """In which dtypes parameters of this one are gathered, and their gradients summed."""
    if not stored.is_floating_point:
        return stored, stored
    compute = rules.compute or stored
    return compute, rules.reduce or compute


def _wanted(row: ParameterRow) -> Wanted:
    # Where another axis shards it unevenly, its ranks hold different numbers of elements, which no
    # one proportion cuts: it stays whole, on one rank of `over` for each coordinate there.
    granule = math.prod(row.local_shape) if row.uneven else 1
    return Wanted(row.names, row.local_shape, granule)


def notes_of(rows: Sequence[ParameterRow], rules: ZeroRules) -> list[str]:
    """What is legal and may surprise."""
    if not any(row.zero for row in rows):
        return []
    whole = [row.name for row in rows if row.zero and row.uneven]
    kept = [row.name for row in rows if not row.zero and not row.global_shape]
    notes = []
    if whole:
        notes.append(
            f"unevenly sharded parameters stay whole on one rank of '{rules.over}': {listed(whole)}"
        )
    if kept:
        notes.append(f"scalars are not sharded over '{rules.over}': {listed(kept)}")
    return notes


def _dtypes(row: BufferRow) -> str:
    stored, compute, reduce = (
        str(one).removeprefix("torch.") for one in (row.dtype, row.compute, row.reduce)
    )
    parts = [
        stored,
        *([f"gathered as {compute}"] if compute != stored else []),
        *([f"reduced in {reduce}"] if reduce != compute else []),
        *([] if row.trainable else ["frozen"]),
    ]
    return ", ".join(parts)


def buffer_table(rows: Iterable[BufferRow], over: str) -> str:
    """The table of flat buffers that `explain` prints; bytes are those of one rank."""
    cells = [
        (
            row.unit or ROOT or "(the rest)",
            f"{row.zero} ({LEVELS[row.zero].rpartition(' ')[2]})",
            _dtypes(row),
            count(len(row.plan.slots), "parameter"),
            human_bytes(row.stored_bytes),
            human_bytes(row.gathered_bytes),
            human_bytes(row.gradient_bytes),
            human_bytes(row.shard_bytes if row.trainable else 0),
        )
        for row in rows
    ]
    header = ["unit", "zero", "dtype", "holds", "stored", "gathered", "gradients", "each state"]
    lines = table(header, cells, right=header[4:])
    return f"sharded over {over}\n\n{lines}"
