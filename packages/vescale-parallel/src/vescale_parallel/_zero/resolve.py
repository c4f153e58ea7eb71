"""ZeRO's rules resolved for a model: the level of each parameter, and the flat buffers they make.

Nothing is allocated: shapes, names and mesh sizes decide everything, so all ranks find the same.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vescale_parallel._common.messages import count, dtype_name, human_bytes, listed, table
from vescale_parallel._notation.glob import matches, named_matches
from vescale_parallel._notation.rows import ParameterRow
from vescale_parallel._zero.flat_plan import FlatPlan, SlotRequest, plan_flat
from vescale_parallel._zero.offload import OPTIMIZER
from vescale_parallel._zero.owners import balanced_owners, plan_owned
from vescale_parallel._zero.rules import LEVELS, ZeroRules
from vescale_parallel._zero.units import ROOT, unit_names, unit_of

_ALIGNMENT_BYTES = 16
"""Where tensors begin in a buffer: what vectorised kernels and collectives load at once."""


@dataclass(frozen=True)
class BufferRow:
    """One flat buffer: the parameters of one unit with the same level, dtypes and requires_grad.

    Attributes:
        unit: name of the module that is gathered as one; "" is the model itself.
        zero: the level, 1 to 3.
        trainable: whether its parameters require a gradient when the model is parallelised.
        plan: where they are and who owns what.
        dtype: of the stored elements.
        compute: dtype of the gathered values.
        reduce: dtype in which gradients are summed.
        owned: whether one rank stores each parameter in full.
        offload: whether its shards lie on the host, and how, see `_zero.offload`.
    """

    unit: str
    zero: int
    trainable: bool
    plan: FlatPlan
    dtype: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    owned: bool = False
    offload: str = ""

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered buffer."""
        return self.plan.total * self.compute.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes that the rank with most owns: also of each optimizer state in this dtype."""
        return self.plan.largest * self.dtype.itemsize

    @property
    def gather_bytes(self) -> int:
        """Bytes that the rank with the largest shard sends in one all-gather."""
        return (self.plan.shards - 1) * self.plan.largest * self.compute.itemsize

    @property
    def reduce_bytes(self) -> int:
        """Bytes that the rank with the smallest shard sends in one reduce-scatter."""
        sent = (self.plan.total - min(self.plan.sizes)) * self.reduce.itemsize
        return sent if self.trainable else 0

    @property
    def packed_bytes(self) -> int:
        """Bytes of the buffer that a reduce-scatter reads, of all its gradients."""
        return self.plan.total * self.reduce.itemsize if self.trainable else 0

    @property
    def stored_bytes(self) -> int:
        """Bytes that stay on the device between steps on the rank with most."""
        return max(self.stored_on(rank) for rank in range(self.plan.shards))

    def stored_on(self, rank: int) -> int:
        """Return the bytes that stay on the device of one rank of the axis that shards."""
        shard = self.plan.sizes[rank] * self.dtype.itemsize
        if self.offload:
            kept = self.plan.sizes[rank] * self.compute.itemsize
            return self.gathered_bytes if self.zero < 3 else kept * (self.offload == OPTIMIZER)
        if self.zero == 3:
            return shard
        # In one dtype the shard is a slice of what is gathered.
        return self.gathered_bytes + (shard if self.compute != self.dtype else 0)

    @property
    def host_bytes(self) -> int:
        """Bytes of parameters on the host of the rank with most; of gradients and states, too."""
        return self.shard_bytes if self.offload else 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that stay on the device until they are set to None."""
        if not self.trainable:
            return 0
        # At level 1 the buffer that the reduce-scatter reads is kept beside its result.
        shard = 0 if self.offload else self.shard_bytes
        return shard + (self.packed_bytes if self.zero == 1 else 0)


def events_of(row: BufferRow) -> dict[str, str]:
    """What is done to a buffer, by verb, as it is called where ranks are compared."""
    unit = f"unit '{row.unit}'" if row.unit else "the rest of the model"
    title = f"{unit} ('{row.plan.slots[0].names[0]}', ...)"
    return {verb: f"{verb} {title}" for verb in ("gathers", "reduces")}


def levels_of(
    rules: ZeroRules,
    rows: Sequence[ParameterRow],
    sizes: Mapping[str, int],
    stacks: Container[str] = (),
    offload: Mapping[str, str] | None = None,
) -> tuple[dict[str, int], list[str]]:
    """Return the level of each parameter by its first name, and what is wrong with the rules.

    `stacks`: names of parameters that experts shard; over the same axis they need no more of it.
    `offload`: for names of parameters, whether anything of them shall lie on the host.
    """
    if not rules.is_used:
        return {}, []
    found, problems = {}, []
    for row in rows:
        globs = list(named_matches(rules.levels, row.names).values())
        levels = {rules.levels[glob] for glob in globs}
        if len(levels) > 1:
            problems.append(
                f"{listed(row.names)} are one parameter, and zero rules {listed(globs)} give it "
                f"different levels ({listed(sorted(levels))}). Give its names one level."
            )
            continue
        # What no rule covers is not sharded: level 0 is what a plan without `zero` says.
        level = levels.pop() if levels else 0
        is_sharded = row.layout.dim_of(rules.over, len(row.global_shape)) is not None
        if is_sharded and row.name in stacks:
            level = 0
        if level and is_sharded:
            problems.append(
                f"parameter '{row.name}': rule '{row.rule}' shards it over '{rules.over}' "
                f"('{row.layout}'), and zero={level} would shard it over '{rules.over}' again. "
                f"Shard over another axis, or give it zero level 0."
            )
        # A scalar has no dim to shard, and an axis of one rank has nothing to share with; but the
        # host of one rank has memory, too.
        several = sizes.get(rules.over, 1) > 1 or bool(
            rules.over in sizes and offload and offload.get(row.name)
        )
        shards = several and math.prod(row.global_shape) > 0
        found[row.name] = level if shards and row.global_shape else 0
    if any(found.values()):
        problems += [text for row in rows if (text := _stored_otherwise(row, rules.over, sizes))]
    return found, problems


def _stored_otherwise(row: ParameterRow, over: str, sizes: Mapping[str, int]) -> str | None:
    """Return what is wrong with a dim that `over` and an axis behind it shard, one in the other.

    Parameters are stored over a mesh with `over` as its last axis, where the same words would give
    each rank other rows.
    """
    dim = row.layout.dim_of(over, len(row.global_shape))
    behind = list(sizes)[list(sizes).index(over) + 1 :] if dim is not None and over in sizes else []
    same = [
        axis
        for axis in behind
        if sizes[axis] > 1 and row.layout.dim_of(axis, len(row.global_shape)) == dim
    ]
    if not same or sizes[over] == 1:
        return None
    return (
        f"parameter '{row.name}': '{row.layout}' shards dim {dim} over '{over}' and {listed(same)}"
        f", which a plan with zero over '{over}' cannot store. Shard it over one of them, or "
        "choose another axis: Zero(over=...)."
    )


def buffers_of(
    rules: ZeroRules, model: nn.Module, rows: Sequence[ParameterRow], sizes: Mapping[str, int]
) -> tuple[BufferRow, ...]:
    """Return the flat buffers, unit by unit in the order of the model."""
    if not any(row.zero for row in rows):
        return ()
    groups: dict[Any, list[SlotRequest]] = {}
    for row in rows:
        if row.zero:
            trainable = model.get_parameter(row.name).requires_grad
            # What one collective shares. Frozen parameters apart: zeros would be sent for them.
            dtypes = (row.dtype, row.compute, row.reduce)
            kind = (row.unit, row.zero, trainable, *dtypes, row.owned, row.offload)
            groups.setdefault(kind, []).append(_wanted(row, rules.tile_rows))
    owned = [one for kind, wanted in groups.items() if kind[-2] for one in wanted]
    # Over all units at once: a rank that owns the large matrix of one has less of the next.
    owners = balanced_owners([one.shape for one in owned], sizes[rules.over])
    owner_of = dict(zip([one.names for one in owned], owners, strict=True))
    made = [
        _buffer(kind, wanted, sizes[rules.over], rules.block, owner_of)
        for kind, wanted in groups.items()
    ]
    units = unit_names(model, rules.units)
    # Sorting keeps the order of equals: buffers of one unit stay in that of their first parameters.
    return tuple(sorted(made, key=lambda one: units.index(one.unit)))


def _buffer(
    kind: Any,
    wanted: Sequence[SlotRequest],
    shards: int,
    block: int,
    owner_of: Mapping[tuple[str, ...], int],
) -> BufferRow:
    unit, zero, trainable, dtype, compute, reduce, owned, offload = kind
    # Aligned in each of the dtypes in which it is ever allocated.
    alignment = max(1, _ALIGNMENT_BYTES // min(one.itemsize for one in (dtype, compute, reduce)))
    if owned:
        plan = plan_owned(wanted, [owner_of[one.names] for one in wanted], shards, alignment)
    else:
        plan = plan_flat(wanted, shards, math.lcm(alignment, block))
    return BufferRow(unit, zero, trainable, plan, dtype, compute, reduce, owned, offload)


def with_units(
    rules: ZeroRules, model: nn.Module, rows: Sequence[ParameterRow]
) -> list[ParameterRow]:
    """Return the rows with the unit of each parameter, and whether one rank owns it in full."""
    if not (rules.is_used or rules.precision):
        return list(rows)
    units = unit_names(model, rules.units)
    return [
        replace(row, unit=unit_of(row.names, units), owned=row.zero > 0 and _is_owned(row, rules))
        for row in rows
    ]


def _is_owned(row: ParameterRow, rules: ZeroRules) -> bool:
    return any(matches(glob, name) for glob in rules.owned for name in row.names)


def _wanted(row: ParameterRow, tile_rows: int) -> SlotRequest:
    # Where another axis shards it unevenly, its ranks hold different numbers of elements, which no
    # one proportion shards: it stays on one rank of `over` for each coordinate there.
    granule = math.prod(row.local_shape) if row.uneven else 1
    if not row.uneven and len(row.local_shape) == 2 and tile_rows > 1:
        granule = tile_rows * row.local_shape[1]
    return SlotRequest(row.names, row.local_shape, granule)


def notes_of(rows: Sequence[ParameterRow], rules: ZeroRules) -> list[str]:
    """Return what is legal and may surprise."""
    if not any(row.zero for row in rows):
        return []
    unsharded = [row.name for row in rows if row.zero and row.uneven]
    kept = [row.name for row in rows if not row.zero and not row.global_shape]
    notes = []
    if unsharded:
        notes.append(
            f"parameters that another axis shards unevenly stay on one rank of '{rules.over}' in "
            f"full: {listed(unsharded)}"
        )
    if kept:
        notes.append(f"scalars are not sharded over '{rules.over}': {listed(kept)}")
    return notes


def _dtypes(row: BufferRow) -> str:
    stored, compute, reduce = map(dtype_name, (row.dtype, row.compute, row.reduce))
    parts = [
        stored,
        *([f"gathered as {compute}"] if compute != stored else []),
        *([f"reduced in {reduce}"] if reduce != compute else []),
        *([] if row.trainable else ["frozen"]),
        *(["on the host"] if row.offload else []),
    ]
    return ", ".join(parts)


def buffer_table(rows: Iterable[BufferRow], over: str) -> str:
    """Return the table of flat buffers that `explain` prints.

    Bytes are those of one rank; of the two collectives, what it sends in each.
    """
    cells = [
        (
            row.unit or ROOT or "(the rest)",
            f"{row.zero} ({LEVELS[row.zero].rpartition(' ')[2]})",
            _dtypes(row),
            count(len(row.plan.slots), "parameter") + (", each on one rank" if row.owned else ""),
            human_bytes(max(row.stored_bytes, row.host_bytes) if row.offload else row.stored_bytes),
            human_bytes(row.gathered_bytes),
            human_bytes(row.gradient_bytes),
            human_bytes(row.shard_bytes if row.trainable else 0),
            human_bytes(row.gather_bytes),
            human_bytes(row.reduce_bytes),
        )
        for row in rows
    ]
    header = ["unit", "zero", "dtype", "holds", "stored", "gathered", "gradients", "each state"]
    header += ["all-gather", "reduce-scatter"]
    lines = table(header, cells, right=header[4:])
    return f"sharded over {over}\n\n{lines}"
