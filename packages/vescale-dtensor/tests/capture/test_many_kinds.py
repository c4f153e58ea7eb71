"""Recordings are bounded: used programs stay, and what changes at every call is named once."""

import gc
import random
import warnings

import pytest
import torch
import vescale_dtensor as vd
from capture_guards import rows, spread
from torch import fx
from vescale_comm.testing import run
from vescale_dtensor import Replicate


def recordings(captured):
    return captured._misses.recordings


def scaled(x, scale=1.0):
    return (x * scale).sum()


def used_programs_stay(rank, world_size):
    captured = vd.capture(scaled)
    often = spread(rows(3, 4), Replicate())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in range(1, 73):
            captured(often)
            captured(spread(rows(size, 5), Replicate()))
    # The first two kinds; 71 replays would pay for two more, and no other kind comes again.
    assert recordings(captured) <= 2 + 71 // 72
    known = captured.programs
    captured(often)
    assert captured.programs[0] in known
    assert captured.replays == 72


def shapes_that_come_often_are_all_recorded(rank, world_size):
    captured = vd.capture(scaled)
    batches = [spread(rows(size, 4), Replicate()) for size in range(1, 11)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1500):
            captured(batches[step * 7 % 10])
    assert len(captured.programs) == recordings(captured) == 10
    before = captured.replays
    for batch in batches:
        captured(batch)
    assert captured.replays == before + 10


def what_changes_is_named_once(rank, world_size):
    captured = vd.capture(scaled)
    x = spread(rows(3, 4), Replicate())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(60):
            captured(x, float(number))
    (warning,) = caught
    assert "argument 1" in str(warning.message)
    settings = {"rate": 0.0}
    captured = vd.capture(lambda x: x * settings["rate"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(60):
            settings["rate"] = float(number)
            assert torch.equal(captured(x).full_tensor(), x.full_tensor() * number)
    (warning,) = caught
    assert "settings['rate']" in str(warning.message)
    assert recordings(captured) == 16


# In calls that run: what a recording of a small block takes, and what a replay saves.
RECORDING, SAVED, CALLS = 12, 0.28, 3000


def recordings_of_many_lengths_are_paid_for(rank, world_size):
    warnings.simplefilter("ignore")
    batches = [spread(rows(size, 4), Replicate()) for size in range(1, 101)]
    for lengths in (8, 20, 50, 100):
        draw = random.Random(lengths)
        in_turn = [number * 7 % lengths for number in range(CALLS)]
        by_chance = [draw.randrange(lengths) for _ in range(CALLS)]
        for order in (in_turn, by_chance):
            captured = vd.capture(scaled)
            for index in order:
                captured(batches[index])
            lost = RECORDING * recordings(captured) - SAVED * captured.replays
            assert lost <= 0.02 * CALLS, (lengths, recordings(captured), captured.replays)
            # And where few lengths come often, each is recorded soon.
            assert lengths > 8 or captured.replays > 0.8 * CALLS, (lengths, captured.replays)


def a_second_kind_waits_until_it_comes_again(rank, world_size):
    captured = vd.capture(scaled)
    one, two, three = (spread(rows(size, 4), Replicate()) for size in (1, 2, 3))
    for x in (one, two, three):
        captured(x)
    assert recordings(captured) == 1
    captured(two)
    assert recordings(captured) == 2
    # After a replay it is recorded at once: a batch for evaluation, say.
    captured = vd.capture(scaled)
    for x in (one, one, two):
        captured(x)
    assert recordings(captured) == 2


def changing_shapes_hold_no_memory(rank, world_size):
    captured = vd.capture(scaled)
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1600):
            captured(spread(rows(1 + step % 100, 4), Replicate()))
            if step in (799, 1599):
                gc.collect()
                kinds = [type(found) for found in gc.get_objects()]
                tensors = sum(issubclass(kind, torch.Tensor) for kind in kinds)
                graphs = sum(issubclass(kind, fx.Graph) for kind in kinds)
                counts.append((len(captured.programs), tensors, graphs, len(kinds)))
    (programs, tensors, graphs, objects), (after, more_tensors, more_graphs, more) = counts
    assert programs <= after <= 6
    assert more_tensors <= tensors
    assert more_graphs <= graphs + after - programs
    # 800 calls later, and any of them may have left something. A program has about 200.
    assert more <= objects * 1.01 + 300 * (after - programs)
    # Of a hundred shapes in turn, programs of a few are kept, and paid for by what they save.
    misses = captured._misses
    assert recordings(captured) <= 2 + misses.replays // 72 + 3
    assert recordings(captured) + misses.replays < 1600


def state_that_changes_for_good_is_recorded_anew(rank, world_size):
    settings = {"rate": 1.0}
    captured = vd.capture(lambda x: x * settings["rate"])
    batches = [spread(rows(size, 4), Replicate()) for size in range(1, 37)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1200):
            if step == 40:  # every program so far is of the other rate
                settings["rate"] = 2.0
                before = captured._misses.replays
            x = batches[step % len(batches)]
            assert torch.equal(captured(x).to_local(), x.to_local() * settings["rate"])
    assert captured._misses.replays > before
    assert recordings(captured) <= 2 * 2 + 3 + captured._misses.replays // 72


def sampled_checks_compare_some_calls(rank, world_size):
    runs = []

    def counted(x):
        runs.append(None)
        return x * 2

    captured = vd.capture(counted, check="sampled", unguarded=["runs"])
    x = spread(rows(3, 4), Replicate())
    seen = []
    for call in range(1, 41):
        before = len(runs)
        captured(x)
        if len(runs) > before:
            seen.append(call)
    assert seen == [1, 2, 4, 8, 16, 32]
    scale = [2.0]
    wrong = vd.capture(lambda x: x * scale[0], check="sampled", unguarded=["scale"])
    wrong(x)
    scale[0] = 3.0
    with pytest.raises(vd.CaptureError, match="differs from the function"):
        wrong(x)


CHECKS = [
    a_second_kind_waits_until_it_comes_again,
    recordings_of_many_lengths_are_paid_for,
    used_programs_stay,
    shapes_that_come_often_are_all_recorded,
    what_changes_is_named_once,
    changing_shapes_hold_no_memory,
    state_that_changes_for_good_is_recorded_anew,
    sampled_checks_compare_some_calls,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_bounds(check):
    run(check, 2, timeout=200)
