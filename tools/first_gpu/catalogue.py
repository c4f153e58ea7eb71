"""The sections, in the order in which they are run: each minute is to tell most.

A section is a module of `sections` with `cases(device) -> list[Case]`, which asks nothing yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Section:
    """One section.

    Attributes:
        name: what `--only` is given, and its module.
        title: one line.
        weight: its share of the time.
        alone: whether nothing runs beside it, as it measures time or comes before all others.
        interpreted: whether Triton's kernels are run by the interpreter where there is no GPU.
    """

    name: str
    title: str
    weight: float
    alone: bool = False
    interpreted: bool = False


SECTIONS: Final = (
    Section("machine", "what this machine is", 2, alone=True),
    Section("rng", "random numbers of shards, bitwise those of torch on one device", 6),
    Section("mesh", "2, 4 and 8 simulated ranks on the one device, beside one device", 8),
    Section("nccl", "a group of one rank: made, each collective called, closed", 1),
    Section("kernels", "every Triton kernel beside its reference", 3, interpreted=True),
    Section("reads", "where a step makes the host wait for the device, with lines", 2),
    Section("streams", "asynchronous collectives, prefetch, offload, saves beside training", 3),
    Section("memory", "peaks beside the counted plan, and what is kept after a step", 2),
    Section("graphs", "capture, static=True, graphs of steps, compiled regions, CUDA graphs", 5),
    Section("speed", "ratios to plain torch and to torch's DTensor; kernels beside a copy", 3,
            alone=True),
)  # fmt: skip


def chosen(names: list[str] | None) -> tuple[Section, ...]:
    """The sections of these names, in the order of the list; all if there are none.

    Raises:
        ValueError: there is no such section.
    """
    known = [section.name for section in SECTIONS]
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        raise ValueError(f"no section is called {unknown[0]!r}; there are: {', '.join(known)}")
    return tuple(one for one in SECTIONS if names is None or one.name in names)
