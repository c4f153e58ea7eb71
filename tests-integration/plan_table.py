"""Writes MODELS.md of vescale-parallel: which unmodified models train by `Plan.from_hf` alone.

python tests-integration/plan_table.py
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from plan_runs import LAYOUTS, NAMES, Compared, compare

FILE = Path(__file__).parent.parent / "packages" / "vescale-parallel" / "MODELS.md"
HEAD = """# Models

Unmodified Hugging Face models, from their configurations with random weights, train over four ranks
as on one device. The plan is `Plan.from_hf(model)` and nothing else; with `zero=3` in the last
column. Written by `python tests-integration/plan_table.py` with transformers {transformers} and
torch {torch}, ranks simulated in one process; `tests-integration/test_plan_models.py` asserts it.

Each figure is one training step in float32: forward with dropout on, loss, backward, clipping,
AdamW, on 5 rows over two ranks or one. It is the largest of three differences from one device: that
of the loss, of a gradient (as a share of its tensor's largest element, at least of a thousandth of
the model's largest), and of a parameter after the step, whose length is 0.01. Heads, hidden sizes
and vocabularies are odd wherever the architecture permits, so that hardly any shard is as large as
the next.

- **rules** of the plan; **sharded**: the share of all parameters that `tp` shards.
- **read from**: the layout that the model declares, or names and shapes of its layers.

{table}

{number} architectures. {low} is the lowest share that is sharded: {reasons}
"""
REASONS = """what a
configuration this small has few of (BART has 1024 rows of positions and 53 of a vocabulary), what
computes by features (the recurrence of Mamba), and what a model declares to be whole (the attention
of DeepSeek-V3) stays on all ranks. That is right, and only costs memory.
"""


def row(name: str) -> tuple[str, ...]:
    found: list[Compared] = [compare(name, layout) for layout in LAYOUTS]
    return (name, *found[0].preset.cells, *(f"{each.worst:.0e}" for each in found))


def text() -> str:
    rows = [row(name) for name in NAMES]
    heads = ("model", "read from", "rules", "sharded", *LAYOUTS)
    lines = [heads, tuple("---" for _ in heads), *rows]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    versions["torch"] = versions["torch"].partition("+")[0]
    return HEAD.format(
        table="\n".join("| " + " | ".join(line) + " |" for line in lines),
        number=len(rows),
        low=min((line[3] for line in rows), key=lambda share: int(share[:-1])),
        reasons=REASONS.strip(),
        **versions,
    )


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
