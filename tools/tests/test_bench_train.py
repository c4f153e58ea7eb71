"""All variants of the training benchmark compute what one device computes, and its meters count."""

import itertools

import pytest
import torch
from torch import nn
from vescale_comm.testing import run

from tools.bench import train
from tools.bench.__main__ import main
from tools.bench._run import table
from tools.bench._train import cases
from tools.bench._train.memory import Live
from tools.bench._train.model import Sizes, seeded
from tools.bench._train.ours import PLAN
from tools.bench._train.predict import FLOAT32
from tools.bench._train.ranks import DifferentLosses, Job, compare, require_alike

SMALL = Sizes(hidden=16, layers=1, heads=2, vocab=32, batch=8, length=6)
BYTES = 4


LAYOUTS = [pytest.param(layout, marks=pytest.mark.slow) for layout in cases.LAYOUTS]


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request):
    """What four ranks find of a small model; `compare` itself refuses other losses."""
    job = Job(layout=request.param, sizes=SMALL, rounds=1, turn=1, profile=1)
    return job, run(compare, 4, job, timeout=280)


def test_every_variant_trains_as_one_device(found):
    job, ranks = found
    for rank in ranks:
        assert list(rank) == list(cases.LAYOUTS[job.layout][1])
        for one in rank.values():
            assert len(one.losses) == 4
            assert len(set(one.losses)) > 1, "a model that learns nothing proves nothing"
            assert len(one.seconds) == job.rounds


@pytest.mark.slow
@pytest.mark.parametrize(("way", "heads"), [("exchange", 4), ("gather", 3)])
def test_a_sharded_sequence_sends_what_code_by_hand_does(way, heads):
    small = Sizes(hidden=24, layers=1, heads=heads, vocab=32, batch=2, length=8)
    job = Job(layout=f"cp4.{way}", sizes=small, rounds=1, turn=1)
    for rank in run(compare, 4, job, timeout=280):
        by_hand, ours = rank[cases.HAND], rank[cases.EAGER]
        # The loss is summed, which by hand is left to whoever asks for it.
        assert ours.collectives == {**by_hand.collectives, "all_reduce": 2}
        assert ours.sent == pytest.approx(by_hand.sent, abs=16)
        assert rank[cases.STEP].collectives == ours.collectives


def test_the_step_by_hand_sends_what_it_must_and_what_the_cost_model_says(found):
    job, ranks = found
    if cases.HAND not in ranks[0]:
        pytest.skip("nobody wrote this layout by hand")
    tp, zero3 = job.layout == "dp2.tp2", job.layout == "dp4.zero3"
    layers = SMALL.layers
    expected = {"all_reduce": 1 + (4 * layers if tp else 0)}
    if zero3:
        # The root once and the blocks again, save the last one; no block is gathered for nothing.
        expected = {"all_gather": 2 * layers, "reduce_scatter": layers + 1}
    axes = cases.LAYOUTS[job.layout][0]
    report = PLAN.check(seeded(SMALL), axes)
    cost = report.cost(SMALL.tokens, zero=3 if zero3 else 0, precision=FLOAT32)
    for rank in ranks:
        by_hand = rank[cases.HAND]
        assert by_hand.collectives == expected
        assert by_hand.sent == pytest.approx(sum(s for _, s, _ in cost.transfers), abs=64)


def test_a_captured_step_is_counted_as_it_replays(found):
    _, ranks = found
    if cases.STEP not in ranks[0]:
        pytest.skip("nothing is captured in this layout")
    for rank in ranks:
        eager, captured = rank[cases.EAGER], rank[cases.STEP]
        assert eager.collectives["all_reduce"] >= 1
        assert captured.collectives == eager.collectives
        assert captured.sent == eager.sent


def test_memory_holds_all_parameters_and_two_moments(found):
    _, ranks = found
    for rank in ranks:
        for one in (each for each in rank.values() if each.collectives):
            assert one.peak.parameters > 0
            assert one.peak.states >= 2 * one.peak.parameters
            assert one.peak.rest > 0


def test_the_tables_name_every_variant_and_the_profile_its_collectives(found):
    job, ranks = found
    first, *others = cases.LAYOUTS[job.layout][1]
    rows = list(train._rows(job, ranks))
    against = {one for one in (cases.HAND, cases.COMPILED_TORCH) if one in others}
    floor = {"its operators + its collectives"} if cases.WHOLE_STEP in others else set()
    assert {row.against for row in rows} == {first} | against | floor
    train._details.note(job, ranks)
    text, data = train.details()
    assert all(name in text for name in cases.LAYOUTS[job.layout][1])
    assert "gloo:" in text
    assert data


@pytest.mark.parametrize("loss", [1.0002, float("nan")])
def test_a_variant_with_another_loss_is_not_timed(loss):
    require_alike("same", [1.000001, 2.0], [1.0, 2.0])
    with pytest.raises(DifferentLosses, match="other: the loss of step 1 is"):
        require_alike("other", [1.0, loss], [1.0, 1.0])


def test_the_meter_counts_what_is_alive_at_the_highest_moment():
    held = torch.ones(1000)
    with Live([held]) as live:
        first = held * 2
        view = first.view(10, 100)  # no storage of its own
        del first
        second = view + 1
        del view, second
        third = held + 1
    assert sum(live.peak.values()) == 3 * 1000 * BYTES
    assert len(live.numbers([held, third])) == 2


def test_the_meter_sees_saved_tensors_and_storages_that_are_resized():
    weight = nn.Parameter(torch.ones(1000))
    with Live([weight]) as live:
        loss = weight.exp().sum()  # keeps the exponentials for backward
        loss.backward()
    # Parameter, saved, one gradient of them and the product; the loss and its gradient.
    assert 3 * 4000 < sum(live.peak.values()) <= 4 * 4000 + 2 * BYTES
    gathered = torch.ones(1000)
    with Live([gathered]) as live:
        gathered.untyped_storage().resize_(0)
        small = torch.ones(10)
        assert sum(live._sizes().values()) == 40
        gathered.untyped_storage().resize_(8000)
        del small
        torch.ones(1)
    assert sum(live.peak.values()) == 8004


def test_a_goal_that_is_to_be_reached_is_missed_from_below():
    rows = {"name": "x", "ours": 1.0, "reference": 1.0, "unit": "s", "ratio": 1.0, "against": "y"}
    both = itertools.product((0.9, 1.1), (False, True))
    told = [
        "missed"
        in table({"title": "", "results": [{**rows, "goal": goal, "more_is_better": more}]})
        for goal, more in both
    ]
    assert told == [True, False, False, True]


def test_options_of_a_benchmark_are_its_own(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--help"])
    assert stopped.value.code == 0
    assert "--profile" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["imports", "--profile"])
    assert stopped.value.code == 2
