"""Custom autograd.Functions that are given DTensors are replayed: bit for bit eager's training.

Every case runs in processes of their own, over dp=2 x tp=2, five steps in each of three layouts of
the batch, beside an eager copy. A Python value that forwards read changes after the third step.
"""

import pytest
import torch
import vescale_dtensor as vd
from function_cases import LAYOUTS, REFUSED, REPLAYED, Scaled, Steps
from vescale_comm.testing import on_ranks, run

STEPS, CHANGED = 5, 3


def alike(one, two):
    return one is two if one is None or two is None else torch.equal(one, two)


def series(steps, layout):
    Scaled.factor, found = 2.0, []
    for seed in range(STEPS):
        if seed == CHANGED:
            Scaled.factor = 5.0
        found.append(steps.run(seed, layout))
    return found


def cases_are_eagers(rank, world_size, where, check, layouts):
    different = []
    for name, case in REPLAYED.items():
        for layout in layouts:
            placements = LAYOUTS[layout]
            expected = series(Steps(case, where), placements)
            captured = Steps(case, where, lambda step: vd.capture(step, check=check))
            found = series(captured, placements)
            if not all(all(map(alike, *pair)) for pair in zip(expected, found, strict=True)):
                different.append((name, layout))
            if captured.step.replays < 2:  # another factor, and gradients, are recorded anew
                different.append((name, layout, "not replayed", captured.step.replays))
    assert not different, different


WHERE = ["inside", "outside", "forward_alone"]
ONE = ["rows over dp"]


@pytest.mark.parametrize("where", WHERE[:2])
def test_replayed_bit_for_bit(where):
    run(cases_are_eagers, 4, where, False, ONE, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("where", WHERE)
def test_in_every_layout(where, check):
    run(cases_are_eagers, 4, where, check, list(LAYOUTS), timeout=110)


@on_ranks(4, timeout=60)
def test_refused_by_name():
    for words, case in REFUSED.items():
        steps = Steps(case, "outside", vd.capture)
        with pytest.raises(vd.CaptureError, match=words):
            steps.run(0, LAYOUTS["rows over dp"])
        # Results that are plain are joined by a profile function, which a recording has in use.
        if "plain" in words:
            continue
        runs_on = Steps(case, "outside", lambda step: vd.capture(step, refused="run"))
        for seed in range(3):
            expected, found = [], []
            for each, results in ((Steps(case, "outside"), expected), (runs_on, found)):
                try:
                    results += each.run(seed, LAYOUTS["rows over dp"])
                except (RuntimeError, vd.DTensorError) as error:  # eager mode's own
                    results.append(type(error))
            assert len(found) == len(expected), (words, found, expected)
            assert found == expected if len(found) == 1 else all(map(alike, found, expected))


@on_ranks(4, timeout=60)
def test_ranks_that_record_at_different_calls(rank, world_size):
    """A rank that records while others replay communicates as they do."""
    switch = {"on": False}

    def case(x, w, v):
        switch["on"]  # which is read, and changes nothing
        return REPLAYED["between uses"](x, w, v)

    eager, captured = Steps(case, "inside"), Steps(case, "inside", vd.capture)
    for seed in range(6):
        # A change that one rank alone sees, and that changes neither numbers nor communication.
        switch["on"] = rank == 1 and seed == 4
        expected = eager.run(seed, LAYOUTS["rows over dp"])
        assert all(map(alike, expected, captured.run(seed, LAYOUTS["rows over dp"])))
    assert len(captured.step.programs) == (2 if rank == 1 else 1)
