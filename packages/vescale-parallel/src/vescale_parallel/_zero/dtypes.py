"""Precision resolved for a model: in which dtype each parameter is stored, sent and reduced."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from vescale_parallel._common.messages import listed
from vescale_parallel._notation.glob import named_matches
from vescale_parallel._notation.rows import ParameterRow
from vescale_parallel._zero.precision import Dtypes
from vescale_parallel._zero.rules import ZeroRules


def with_dtypes(
    rules: ZeroRules, rows: Sequence[ParameterRow]
) -> tuple[list[ParameterRow], list[str]]:
    """Return the rows with their dtypes, and what is wrong with the rules."""
    if not rules.precision:
        return list(rows), []
    found, problems = [], []
    for row in rows:
        said = _rules(rules, row.names)
        if len(said) > 1:
            problems.append(
                f"{listed(row.names)} are one parameter, and precision rules give it different "
                "dtypes. Give its names one rule."
            )
        found.append(_cast(row, said[0]))
    return found, problems


def _rules(rules: ZeroRules, names: Sequence[str]) -> list[Dtypes]:
    """What the rules say of a tensor with these names; more than one where they disagree."""
    globs = named_matches(rules.precision, names).values()
    return list(dict.fromkeys(rules.precision[glob] for glob in globs)) or [Dtypes()]


def _cast(row: ParameterRow, said: Dtypes) -> ParameterRow:
    dtype, compute, reduce = said.of(row.dtype)
    # By elements: what is stored in another dtype has as many.
    size = row.local_bytes // row.dtype.itemsize * dtype.itemsize
    # What is not sharded is summed where its gradient is stored: no buffer of its own is reduced.
    reduce = reduce if row.zero else dtype
    return replace(row, dtype=dtype, compute=compute, reduce=reduce, local_bytes=size)


def cast_buffers_of(rules: ZeroRules, model: nn.Module) -> tuple[tuple[str, torch.dtype], ...]:
    """Buffers of modules that are stored in another dtype than that in which they were built."""
    found = []
    for name, buffer in model.named_buffers():
        dtype = _rules(rules, [name])[0].buffers
        if dtype is not None and buffer.is_floating_point() and buffer.dtype != dtype:
            found.append((name, dtype))
    return tuple(found)


def dtype_notes(rows: Sequence[ParameterRow], rules: ZeroRules) -> list[str]:
    """Return what is legal and may surprise."""
    other = [row.name for row in rows if not row.zero and _wanted_reduce(row, rules) != row.reduce]
    if not other:
        return []
    return [
        "gradients of parameters that zero does not shard are summed in the dtype in which they "
        f"are stored: {listed(other)}"
    ]


def _wanted_reduce(row: ParameterRow, rules: ZeroRules) -> torch.dtype:
    said = _rules(rules, row.names)[0]
    return said.reduce or said.compute or row.reduce
