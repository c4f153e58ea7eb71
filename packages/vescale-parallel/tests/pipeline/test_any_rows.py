"""A batch of any number of rows is a step in stages, as it is on one device of the same parts.

The last batch of an ordinary loader has any number of rows: they make as many microbatches as the
plan has where they do, and else fewer, of which none is empty.
"""

from typing import Any

import pytest
import torch
from stage_runs import batch, make, plan, require_gradients, step_both, whole
from vescale_comm import simulate
from vescale_parallel import Plan, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel._pipeline.microbatches import sizes_of
from vescale_parallel.schedules import SCHEDULES
from zero_models import PARAMETERS

PARTS = 4
SMALL = (1, 3, 5, 6, 9)
"""Those that `torch.chunk` does not divide by four, and one that leaves two stages without any."""


def any_rows(
    rank: int, world_size: int, sizes: dict[str, int], how: Plan, tied: bool, rows: tuple[int, ...]
) -> None:
    model, plain = make(tied), make(tied)
    parallelize(model, make_mesh(device_type="cpu", **sizes), how)
    torch.manual_seed(5)
    # A full batch between smaller ones: what is known of either stays.
    for count in (*rows, 8, rows[0]):
        step_both(model, plain, PARTS, *batch(count, count))
        # A mean over one row has larger gradients than those of whole batches elsewhere.
        require_gradients(model, plain, atol=1e-6)
        with torch.no_grad():
            step_both(model, plain, PARTS, *batch(count, count))
            for one in (model, plain):
                one.eval()
            step_both(model, plain, PARTS, *batch(count, count))
            found = whole(model(*batch(count, count)))
            torch.testing.assert_close(found, plain(*batch(count, count)))
        for one in (model, plain):
            one.train().zero_grad()


def run_rows(
    sizes: dict[str, int], schedule: str, tied: bool, words: dict[str, Any], rows: tuple[int, ...]
) -> None:
    how = Plan(parameters=PARAMETERS, microbatches=PARTS, **words)
    if "pp" in sizes:
        how = plan(schedule, PARTS, **words)
    simulate(torch.Size(sizes.values()).numel())(any_rows, sizes, how, tied, rows)


CASES = [
    *(({"pp": 2}, name, at % 2 > 0, {}) for at, name in enumerate((*SCHEDULES, "auto"))),
    ({"pp": 4}, "1f1b", True, {}),
    ({"pp": 2, "dp": 2}, "1f1b", False, {}),
    ({"pp": 2, "tp": 2}, "zbv", True, {}),
    ({"pp": 2, "dp": 2}, "interleaved", False, {"zero": 3}),
    ({"pp": 2, "dp": 2}, "dualpipev", True, {"zero": 2}),
    ({"pp": 2, "dp": 2}, "gpipe", False, {"zero": 3, "checkpoint": "full"}),
    ({"dp": 2}, "accumulated", False, {}),
    ({"dp": 2}, "accumulated", True, {"zero": 3}),
    ({"dp": 2, "tp": 2}, "accumulated", False, {"zero": 3}),
]


@pytest.mark.parametrize(("sizes", "schedule", "tied", "words"), CASES, ids=str)
def test_every_number_of_rows(
    sizes: dict[str, int], schedule: str, tied: bool, words: dict[str, Any]
):
    run_rows(sizes, schedule, tied, words, tuple(range(1, 18)))


def test_rows_that_microbatches_do_not_divide():
    run_rows({"pp": 2}, "zbv", False, {}, SMALL)


def test_chunks_stay_where_they_make_as_many_parts():
    for rows in range(1, 40):
        for parts in range(1, 9):
            found, chunks = sizes_of(rows, parts), torch.arange(rows).chunk(parts)
            if len(chunks) == parts:
                assert found == [len(one) for one in chunks]
            assert (sum(found), len(found), min(found) > 0) == (rows, min(rows, parts), True)
            assert max(found) == -(-rows // parts)
