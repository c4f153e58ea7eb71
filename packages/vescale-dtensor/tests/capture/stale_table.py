"""Print the table {kind of state} x {where it is held} of what a captured function makes of it.

    python packages/vescale-dtensor/tests/capture/stale_table.py > packages/vescale-dtensor/STATE.md

On one rank of torch's fake process group, whose collectives send nothing; `test_stale_state` has
real ranks.
"""

import io
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from stale_holders import HOLDERS  # noqa: E402
from test_stale_state import table  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

TITLE = """\
# State that a captured function reads

What becomes of a captured function when state that it reads changes, by the kind of state and where
it is held. *right*: the next call is as in eager mode, to the bit, and calls between changes are
replayed; *refused*: the recording is refused, with words; *runs*: nothing is recorded, and the
function runs as it is. `tests/capture/stale_table.py` wrote this page, and
`tests/capture/test_stale_state.py` fails where anything goes on with old state.

"""


def written(found, version):
    """The page, of the verdicts for each kind and holder."""
    words = [verdict for row in found.values() for verdict in row.values()]
    count = {word: words.count(word) for word in ("right", "refused", "runs")}
    lines = [
        f"{len(found)} kinds, {len(words)} cells, torch {version}: {count['right']} right, "
        f"{count['refused']} refused, {count['runs']} run as they are.",
        "",
        f"| kind of state | {' | '.join(HOLDERS)} |",
        f"|---|{'---|' * len(HOLDERS)}",
    ]
    lines += [f"| {name} | {' | '.join(row.values())} |" for name, row in found.items()]
    return TITLE + "\n".join(lines) + "\n"


def main():
    from stale_kinds_switches import KINDS

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    found = {}
    with redirect_stdout(io.StringIO()):  # what some kinds print
        for name in KINDS:
            row = table(0, 2, name, HOLDERS)
            found[name] = {where: verdict for where, (verdict, _) in row.items()}
    stale = [name for name, row in found.items() if "STALE" in row.values()]
    if stale:
        sys.exit(f"stale: {stale}")
    print(written(found, torch.__version__.partition("+")[0]), end="")


if __name__ == "__main__":
    main()
