"""One's own schedule runs as one of ours does; "auto" takes the best, the same on every rank."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_runs import accumulate, batch, make, plan, staged, train
from vescale_comm import simulate
from vescale_parallel import Plan, PlanError, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel._pipeline.plan.schedule_choice import best_in_place, schedule_for
from vescale_parallel._pipeline.run.measurements import KeptBytes
from vescale_parallel._step.forward_backward import step_of
from vescale_parallel.schedules import SCHEDULES, StageTimes, make_schedule, simulate_schedule


def backwards_first_of_all(ranks: int, microbatches: int) -> list[list[str]]:
    """GPipe with its backwards in the order of 1F1B's forwards."""
    each = range(microbatches)
    return [[f"{r}F{m}" for m in each] + [f"{r}B{m}" for m in reversed(each)] for r in range(ranks)]


def test_a_function_makes_the_schedule():
    simulate(2)(train, {"pp": 2}, plan(backwards_first_of_all, 4), True, 7)  # type: ignore[arg-type]


def test_a_file_has_the_schedule(tmp_path: Path):
    path = tmp_path / "mine.csv"
    path.write_text(make_schedule("zbv", 2, 4).to_csv())
    how = Plan(pipeline=str(path))
    path.unlink()
    assert Plan.from_json(how.to_json()) == how
    simulate(2)(train, {"pp": 2}, how, False, 8)


WRONG: dict[str, tuple[Any, str]] = {
    "no file": ("missing.csv", "cannot be read"),
    "no name": ("1f1c", r"no schedule '1f1c'.*1f1b"),
    "no action": ("0F0,0X0\n1F0,1B0\n", "'0X0' is no action"),
    "other microbatches": (make_schedule("1f1b", 2, 3).to_csv(), "3 microbatches"),
    "other ranks": (make_schedule("1f1b", 3, 4).to_csv(), "has 3 ranks"),
    "a deadlock": ("0B0,0F0\n1F0,1B0\n", "never ends"),
    "half a backward": ("0F0,0I0\n1F0,1B0\n", "needs F and B"),
    "no actions": (lambda ranks, microbatches: None, "returned NoneType"),
    "no schedule": (7, "no schedule 7"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_schedule_is_refused(case: str):
    given, words = WRONG[case]
    microbatches = 1 if case in ("a deadlock", "half a backward") else 4
    with pytest.raises(PlanError, match=words):
        Plan(pipeline=given, microbatches=microbatches).check(make(), {"pp": 2})


def test_schedules_are_written_as_their_csv():
    given = make_schedule("zbv", 2, 4)
    how = Plan(pipeline=given)
    for again in (Plan.from_json(how.to_json()), Plan.from_toml(how.to_toml())):
        assert again == Plan(pipeline=given.to_csv())
        split = again.check(make(), {"pp": 2}).split
        assert split is not None
        assert split.schedule._replace(name=given.name) == given


def test_what_is_called_as_a_function_may_lie_elsewhere_on_each_rank():
    def run(rank: int, world_size: int) -> None:
        own = partial(lambda name, *counts: make_schedule(name, *counts), "1f1b")
        parallelize(make(), make_mesh(device_type="cpu", pp=2), plan(own, 4))  # type: ignore[arg-type]

    simulate(2)(run)


def test_functions_are_not_written():
    with pytest.raises(PlanError, match="to_csv"):
        plan(backwards_first_of_all, 4).to_json()  # type: ignore[arg-type]


def test_ranks_with_other_schedules_are_told():
    def on_a_rank(rank: int, world_size: int) -> str:
        other = ("gpipe", "1f1b")[rank]

        def schedule(ranks: int, microbatches: int) -> Any:
            return make_schedule(other, ranks, microbatches)

        with pytest.raises(Exception, match="schedule") as told:
            parallelize(make(), make_mesh(device_type="cpu", pp=2), plan(schedule, 4))  # type: ignore[arg-type]
        return str(told.value)

    assert all("actions of the pipeline" in one for one in simulate(2)(on_a_rank))


# The best of all.


def test_places_are_those_of_the_best_that_has_blocks_enough():
    assert schedule_for("auto", 4, 8, 2, 8).name == "zbv"
    few = schedule_for("auto", 4, 8, 2, 4)
    assert few.stages == 4
    assert few.name in ("zb-h1", "zb-greedy")


@pytest.mark.parametrize("base", ["zbv", "1f1b", "interleaved"])
def test_the_best_in_place_is_the_fastest_that_fits(base: str):
    schedule = make_schedule(base, 4, 16)
    times = [StageTimes(1 + s % 3, 1.5, 0.5, 10.0, 10.0) for s in range(schedule.stages)]
    free = best_in_place(schedule, times, None)
    assert free.schedule.stage_ranks == schedule.stage_ranks
    every = [
        simulate_schedule(one, times)
        for name in SCHEDULES
        if (one := make_schedule(name, 4, 16, times=times[:4])).stage_ranks == schedule.stage_ranks
    ]
    assert free.seconds == pytest.approx(min(one.seconds for one in every))
    least = min(one.peak for one in every)
    assert best_in_place(schedule, times, least).peak == least
    with pytest.raises(PlanError, match="keeps at most"):
        best_in_place(schedule, times, least - 1)


def auto(rank: int, world_size: int, sizes: dict[str, int], memory: int | None) -> tuple[str, Any]:
    words = {"schedule": "auto", "microbatches": 4, "memory": memory}
    model, plain = make(), make()
    staged(model, sizes, **words)
    torch.manual_seed(5)
    losses = []
    for step in range(4):
        start = torch.get_rng_state()
        expected = accumulate(plain, 4, *batch(step))
        torch.set_rng_state(start)
        try:
            losses.append(forward_backward(model, *batch(step)))
        except PlanError as error:
            return str(error), step
        torch.testing.assert_close(losses[-1], expected, rtol=1e-6, atol=1e-7)
    step = step_of(model)
    return step._schedule.name, step._scene.kept


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_all_ranks_choose_alike(sizes: dict[str, int]):
    found = simulate(torch.Size(sizes.values()).numel())(auto, sizes, None)
    assert len({name for name, _ in found}) == 1
    assert all(kept and min(kept.values()) > 0 for _, kept in found)


def test_too_little_memory_is_told_on_every_rank():
    for told, step in simulate(2)(auto, {"pp": 2}, 1):
        assert "keeps at most 1 bytes" in told
        assert step == 1


def test_kept_bytes_are_those_of_activations():
    layer = torch.nn.Linear(4, 4, bias=False)
    x = torch.randn(8, 4)
    with KeptBytes(layer) as kept:
        layer(layer(x).tanh()).sum()
    # The input of each product, and what tanh returns, which is the second one's.
    assert kept.total == 2 * x.numel() * 4
