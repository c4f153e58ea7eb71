"""Sequences and experts over ranks against one device: run `python sequence_table.py`.

Every model on every layout of four or eight ranks. A cell trains the model over the mesh and asks
for: parameters after `parallelize` bitwise those of one device; the random generator behind each
step bitwise where one device leaves it, which every mask of dropout moves; every expert that a
token chose bitwise the same; losses within 1e-5 of one device's. A cell that fails prints why.

    python sequence_table.py                               # all cells, 20 steps
    python sequence_table.py --models Mixtral --steps 3    # some
    python sequence_table.py --cells cells.json            # go on where it stopped
    python sequence_table.py --write ../packages/vescale-parallel/SEQUENCES.md
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import context_runs
import expert_runs
import torch
from vescale_comm import simulate

STEPS, TOLERANCE = 20, 1e-5
SEQUENCES = {
    "Llama, dropout in attention": "llama",
    "GPT-2, dropout": "gpt2",
    "Mistral, sliding window": "mistral",
    "Llama, packed documents": "packed",
    "Llama, padding": "padded",
}
EXPERTS = {"Mixtral": "Mixtral", "Qwen-MoE": "Qwen-MoE", "DeepSeek-V3": "DeepSeek",
           "GPT-OSS": "GPT-OSS", "MoE of this package": "own"}  # fmt: skip


def named(layouts: Sequence[str]) -> dict[str, str]:
    """How a table calls layouts: `cp2-tp2-ring` is `cp2·tp2, ring`."""
    return {
        one.replace("-ring-balanced", ", ring, balanced").replace("-ring", ", ring")
        .replace("-", "·"): one
        for one in layouts
    }  # fmt: skip


TABLES: dict[str, tuple[dict[str, str], dict[str, str], Any]] = {
    "Sequences": (SEQUENCES, named(list(context_runs.MESHES)), context_runs.train),
    "Experts": (EXPERTS, named(list(expert_runs.MESHES)), expert_runs.train),
}
MESHES: dict[str, Any] = {"Sequences": context_runs.MESHES, "Experts": expert_runs.MESHES}


@cache
def alone(table: str, kind: str, steps: int) -> Any:
    """The training on one device."""
    return TABLES[table][2](kind, None, steps)


def cell(table: str, kind: str, layout: str, steps: int) -> str:
    """The largest relative distance of a loss from one device's, or what went wrong."""
    wanted, train = alone(table, kind, steps), TABLES[table][2]
    try:
        world = math.prod(MESHES[table][layout][0].values())
        ranks = simulate(world)(lambda rank, world: train(kind, layout, steps))
    except Exception as error:
        cause = error.__cause__ or error
        return f"{type(cause).__name__}: {cause}".replace("\n", " ")[:300]
    why, worst = max(difference(one, wanted) for one in ranks)
    return why or f"{worst:.0e}"


def difference(found: Any, wanted: Any) -> tuple[str, float]:
    """What is not as it has to be, if anything, and how far losses are apart."""
    if found.made != wanted.made:
        return "parameters at the beginning", 0.0
    if getattr(found, "drawn", None) != getattr(wanted, "drawn", None):
        return "masks", 0.0
    chosen = [getattr(one, "chosen", []) for one in (found, wanted)]
    if len(chosen[0]) != len(chosen[1]) or not all(map(torch.equal, *chosen)):
        return "routing", 0.0
    pairs = zip(found.losses, wanted.losses, strict=True)
    worst = max(abs(one - other) / abs(other) for one, other in pairs)
    return "" if worst <= TOLERANCE else f"losses: {worst:.0e}", worst


class Cells:
    """Cells that ran, kept in a file so that a run goes on where another one stopped."""

    def __init__(self, path: Path | None, steps: int) -> None:
        self._path, self._steps = path, steps
        known = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self._known: dict[str, str] = known

    def get(self, table: str, kind: str, layout: str) -> str:
        """Run a cell, unless it ran before with as many steps."""
        key = f"{table} {kind} {layout} {self._steps}"
        if key not in self._known:
            start = time.monotonic()
            self._known[key] = cell(table, kind, layout, self._steps)
            print(f"{key}: {self._known[key]}, {time.monotonic() - start:.0f} s", flush=True)
            if self._path is not None:
                self._path.write_text(json.dumps(self._known, indent=1))
        return self._known[key]


def document(models: Sequence[str], steps: int, cells: Path | None = None) -> str:
    """Run the cells of these models; returns Markdown."""
    kept = Cells(cells, steps)
    lines = [
        "# Sequences and experts over ranks, beside one device",
        "",
        "Written by `tests-integration/sequence_table.py`, "
        f"{datetime.now(UTC):%Y-%m-%d}. Unmodified models of Hugging Face, AdamW and clipping, "
        f"{steps} steps on as many ranks as a layout names (with zero3 on twice as many, as dp2). "
        "In every cell parameters begin bitwise "
        "as on one device; of sequences, the random generator stands behind each step where one "
        "device leaves it, masks being drawn; of experts, tokens choose the same ones, bit for "
        "bit. The figure is the largest relative distance of a loss from one device's. Sequences "
        'of 30 tokens, which four ranks do not divide; ring: `Plan(sequence="ring")`; balanced: in '
        "several blocks.",
    ]
    for table, (kinds, layouts, _) in TABLES.items():
        lines += ["", f"## {table}", "", f"| model | {' | '.join(layouts)} |"]
        lines.append("|" + "---|" * (1 + len(layouts)))
        for model, kind in kinds.items():
            if model in models:
                row = [kept.get(table, kind, layout) for layout in layouts.values()]
                lines.append(f"| {model} | {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> None:
    """Print or write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [*SEQUENCES, *EXPERTS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--cells", type=Path, help="a file that keeps cells which ran")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = document(options.models, options.steps, options.cells)
    if options.write:
        options.write.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
