"""Writes CONSISTENCY.md of vescale-parallel: what trains as on one device, feature by layout.

python tests-integration/consistency_table.py                # all of it: half an hour
python tests-integration/consistency_table.py --cells FILE   # cells that FILE has are not run again
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import consistency_stock
from consistency_models import KINDS
from consistency_runs import FEATURES, LAYOUTS, LOSS_BOUND, PARAMETER_BOUND, Compared, compare

FILE = Path(__file__).parent.parent / "packages" / "vescale-parallel" / "CONSISTENCY.md"
HEAD = """# Consistency

Twenty steps of training on four ranks, beside one device: four kinds of transformers, written for
one device (`tests-integration/consistency_models.py`), AdamW with clipping, float32. Written by
`python tests-integration/consistency_table.py` on {date} with torch {torch} on CPU, ranks
simulated in one process; `tests-integration/test_consistency.py` asserts a part of it on changes,
and all of it with `-m slow`.

Everywhere below, on every rank, **initial parameters, all dropout masks that were watched and the
state of the random generator at the end have the bits of one device**. A cell is the largest
relative difference of a loss (asserted: {loss:.0e}) · the largest difference of an element of a
parameter after the last step (asserted: {parameter:.0e}; a step is 3e-03 long).

- **init**: built under `deferred()`, compared, then drawn again in place on the mesh; no dropout.
- **dropout**, on the residual, as in all rows below; masks of the first and the last step are
  compared. **attention dropout**: on the weights, where heads are sharded.
- **checkpoint recompute**: `torch.utils.checkpoint` around each block; the masks that are drawn
  again are compared too.
- **uneven batch**: 7, 5 and 3 rows in turn; of four ranks one has none then.
- **tied weights**: the head is the embedding; in the ViT, matrices of two blocks are one.
- **unused parameters**: a module that is never called, and a block left out of every third step.
- **accumulation**: two backwards for a step, the first in `no_sync`.
- Layouts with `tp` have sequence parallelism. `zero1` to `zero3` are on dp4, **HSDP** is `zero=3`
  on replica2·dp2, **static** is zero3·tp2 with `parallelize(..., static=True)`, whose masks are
  watched in the first step only: what is watched is not replayed.
"""
STOCK_HEAD = """
# The same rows by torch alone

DDP (dp4), `parallelize_module` (tp4), both with `fully_shard` (dp2·tp2: kept gathered), and
`fully_shard` alone, as a user writes them after the tutorials (`consistency_stock.py`): four gloo
processes seeded alike, each with its own rows, the mean of the ranks' losses. A dash: these three
have no counterpart. After the differences stands what is not that of one device: initial parameters
(drawn in place on the mesh), the share of dropped elements that are dropped there too, and the
random generator. NaN: a rank without rows has no mean; WorkerError: a rank raised, as it has no
rows, and the others wait; ValueError: `fully_shard` refuses matrices of two blocks that are one.
Where ranks have unequal numbers of rows or of tokens that count, the
mean of their means is another number than that of one device.
"""

Cells = dict[str, "Compared | str"]


def cell_text(found: Compared | str | None) -> str:
    """A cell; an error is named by its first words."""
    if found is None:
        return "not run"
    if not isinstance(found, Compared):
        return f"error: {found.partition(':')[0]}" if found else "-"
    parts = [f"{found.loss:.0e} · {found.parameter:.0e}"]
    parts += [] if found.init else ["init"]
    parts += [] if found.masks == 1.0 else [f"masks {found.masks:.0%}"]
    parts += [] if found.generator else ["generator"]
    return ", ".join(parts)


def tables(cells: Cells) -> str:
    """A table for each kind of model."""
    found = []
    for kind in KINDS:
        rows = [("", *LAYOUTS), ("---",) * (len(LAYOUTS) + 1)]
        for name in FEATURES:
            rows.append((name, *(cell_text(cells.get(key(kind, name, at))) for at in LAYOUTS)))
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        found.append("\n".join([f"\n## {kind}\n", *lines]))
    return "\n".join(found) + "\n"


def key(kind: str, name: str, column: str) -> str:
    return f"{kind}, {name}, {column}"


class Kept:
    """Cells in a file, so that a run that was ended goes on."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.found: dict[str, Cells] = {"ours": {}, "stock": {}}
        if path is not None and path.exists():
            for side, cells in json.loads(path.read_text()).items():
                self.found[side] = {
                    name: one if isinstance(one, str) else Compared(**one)
                    for name, one in cells.items()
                }

    def fill(self, side: str, run: Callable[[str, str, str], Compared | str]) -> Cells:
        """Run what is missing."""
        cells = self.found[side]
        for kind in KINDS:
            for name in FEATURES:
                for column in LAYOUTS:
                    if key(kind, name, column) not in cells:
                        cells[key(kind, name, column)] = run(kind, name, column)
                        print(side, kind, name, column, cells[key(kind, name, column)], flush=True)
                        self.write()
        return cells

    def write(self) -> None:
        if self.path is not None:
            content = {
                side: {n: one if isinstance(one, str) else asdict(one) for n, one in cells.items()}
                for side, cells in self.found.items()
            }
            self.path.write_text(json.dumps(content, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=Path, help="JSON with what has been found already")
    only: dict[str, Any] = {"choices": ["ours", "stock"], "help": "find these cells; no table"}
    parser.add_argument("--only", **only)
    parser.add_argument("--write", action="store_true", help="write --cells; run nothing")
    options = parser.parse_args()
    kept = Kept(options.cells)
    sides = {"ours": compare, "stock": consistency_stock.compare}
    for side, run in sides.items():
        if options.only in (None, side) and not options.write:
            kept.fill(side, run)
    if options.only is None:
        torch = importlib.metadata.version("torch").partition("+")[0]
        head = HEAD.format(
            date=datetime.now(UTC).date(),
            torch=torch,
            loss=LOSS_BOUND,
            parameter=PARAMETER_BOUND,
        )
        text = head + tables(kept.found["ours"]) + STOCK_HEAD + tables(kept.found["stock"])
        FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
