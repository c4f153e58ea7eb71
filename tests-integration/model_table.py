"""Writes MODELS.md of vescale-dtensor: which unmodified models train, and what they cost.

python tests-integration/model_table.py
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from model_runs import LAYOUTS, Found, compare
from model_zoo import MODELS
from model_zoo_more import EVERY
from model_zoo_wide import WIDE_ZOO
from vescale_comm.testing import run

FILE = Path(__file__).parent.parent / "packages" / "vescale-dtensor" / "MODELS.md"
HEAD = """# Models

Unmodified models, from their configurations with random weights, train over four ranks as on one
device. All that is given is a layout for each parameter and `dp:0` for the batch. Written by
`python tests-integration/model_table.py` with transformers {transformers} and torch {torch};
`tests-integration/test_models.py` asserts it.

Each row is one training step in float32: forward with dropout on, loss, backward, clipping, AdamW.
The batch has 5 rows, over two or four ranks; heads, hidden sizes and vocabularies are odd wherever
the architecture permits, so that hardly any shard is as large as the next.

- **loss**: minus that of one device. **output**, **gradient**: the largest difference, as a share
  of the largest element of the tensor (of gradients: of at least a thousandth of the largest of the
  model). **parameter**: the largest difference after the step, whose length is 0.01.
- **native**: calls of torch functions in forward that ran by a rule, on operands as they are or
  redistributed in the cheapest way. **fell back**: those whose operands were replicated first; in
  brackets the bytes that rank 0 sent for them, and for everything in forward.

## The named models

Nothing falls back inside their blocks.

{named}

## Others

`dp=2, tp=2`. These layouts follow a fixed rule: every matrix, table and kernel is sharded over `tp`
by the kind of its module. torch's own run in float64.

{others}

## By the dozen

What Hugging Face's auto-classes offer besides, made small by one table of sizes
(`tests-integration/model_zoo_wide.py`), with layouts by the same rule.

{dozen}
"""
COLUMNS = ["model", "layout", "loss", "output", "gradient", "parameter", "native"]


def row(name: str, layout: str, found: Found) -> tuple[str, ...]:
    fallbacks = ", ".join(f"{op} {count}" for op, count in sorted(found.fallbacks.items()))
    return (
        name,
        layout,
        f"{found.loss:.0e}",
        f"{found.output:.0e}",
        f"{found.gradient:.0e}",
        f"{found.parameter:.0e}",
        str(found.native),
        f"{fallbacks or '-'} ({found.bytes:,} of {found.sent:,})",
    )


def table(rows: list[tuple[str, ...]]) -> str:
    heads = [*COLUMNS, "fell back"]
    lines = [heads, ["---" for _ in heads], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def text() -> str:
    def measured(name: str, layout: str) -> tuple[str, ...]:
        return row(name, layout, run(compare, 4, name, layout, timeout=280)[0])

    named = [measured(name, layout) for name in MODELS for layout in LAYOUTS]
    others = [measured(name, "dp=2, tp=2") for name in EVERY if name not in MODELS]
    dozen = [measured(name, "dp=2, tp=2") for name in sorted(WIDE_ZOO)]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    versions["torch"] = versions["torch"].partition("+")[0]
    tables = {"named": table(named), "others": table(others), "dozen": table(dozen)}
    return HEAD.format(**tables, **versions)


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
