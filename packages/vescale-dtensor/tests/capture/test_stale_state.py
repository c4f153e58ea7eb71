"""No captured function goes on with old state, whatever the kind of state and wherever it is held.

Each cell of the table runs two copies of a function on equal state, one of them captured, three
times before and three times after each of two changes, and compares results and what is left
behind bit for bit. A cell is right (then the third call of each three is a replay), refused with a
`CaptureError`, or never recorded and run as it is; anything else is stale. Which one it is stands
on the page STATE.md. Here each kind has two of the holders; `stale_table` tries them all.
"""

import zlib
from pathlib import Path

import pytest
import torch
import vescale_dtensor as vd
from capture_guards import rows, spread
from stale_holders import HOLDERS
from stale_kinds_switches import KINDS
from stale_kinds_world import MAY_BE_LACKING
from torch.utils._pytree import tree_flatten
from vescale_comm.testing import run

CALLS, CHANGES = 3, 2
VERSION = torch.__version__.partition("+")[0]
PAGE = Path(__file__).parents[2] / "STATE.md"


class Copy:
    """One copy of a function, with state of its own."""

    def __init__(self, kind, hold, wrap):
        torch.manual_seed(0)
        self.kind, self.value = kind, kind.make()
        function, self.put, self.more = hold(kind.use)
        self.function = wrap(function)
        self.put(self.value)

    def call(self, x):
        return plain(self.function(x, *self.more())), plain(self.kind.seen(self.value))

    def replays(self):
        return self.function._misses.replays

    def change(self):
        self.value = self.kind.change(self.value)
        self.put(self.value)


def plain(tree):
    """The values of a result, as they are now."""
    leaves = tree_flatten(tree)[0]
    return [v.to_local().clone() if isinstance(v, vd.DTensor) else v for v in leaves]


def alike(one, two):
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(map(alike, one, two))
    return one == two


def verdict(kind, hold):
    """What becomes of one cell."""
    eager = Copy(kind, hold, lambda function: function)
    captured = Copy(kind, hold, vd.capture)
    replayed = 0
    for step in range(CHANGES + 1):
        for call in range(CALLS):
            before = captured.replays()
            x = rows(5, 4, seed=10 * step + call)
            wanted = eager.call(spread(x))
            try:
                found = captured.call(spread(x))
            except vd.CaptureError as error:
                return "refused", str(error)
            if not alike(found, wanted):
                return "STALE", f"change {step}, call {call}"
            replayed += call == CALLS - 1 and captured.replays() > before
        eager.change(), captured.change()
    return ("right" if replayed == CHANGES + 1 else "runs"), ""


def table(rank, world_size, name, holders):
    """A row of the table: the verdict for each holder."""
    found = {where: verdict(KINDS[name], HOLDERS[where]) for where in holders}
    KINDS[name].make()  # which puts settings of the process back
    return found


def said():
    """What the page says of each kind, by where it is held."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    (_, *holders), *rows = (line.strip("| ").split(" | ") for line in lines)
    return {kind: dict(zip(holders, words, strict=True)) for kind, *words in rows}


@pytest.mark.parametrize("name", KINDS)
def test_as_the_page_says(name):
    first, holders = zlib.crc32(name.encode()), list(HOLDERS)
    two = [holders[(first + more) % len(holders)] for more in (0, 3)]
    by_rank = run(table, 2, name, two)
    for row in by_rank:
        assert not {where: why for where, (found, why) in row.items() if found == "STALE"}
    words = [{where: found for where, (found, _) in row.items()} for row in by_rank]
    assert words[0] == words[1], "a rank that records while another replays waits for it"
    if f"torch {VERSION}" in PAGE.read_text():  # others have other settings
        assert words[0] == {where: said()[name][where] for where in two}


def test_the_page_has_every_kind():
    if f"torch {VERSION}" not in PAGE.read_text():
        pytest.skip("STATE.md was written for another torch")  # which has other settings
    assert set(KINDS) <= set(said()), "stale_table.py writes the page"
    assert set(said()) - set(KINDS) <= MAY_BE_LACKING
