"""Pipeline schedules on paper: made, checked, simulated, compared and drawn, without processes.

    from vescale_parallel.schedules import StageTimes, best_schedule, make_schedule
    from vescale_parallel.schedules import simulate_schedule

    timeline = simulate_schedule(make_schedule("zbv", ranks=8, microbatches=32))
    print(timeline.bubble, timeline.peak)
    best_schedule(8, 32, times=StageTimes(forward=1.0, inputs=1.1, weights=0.9), memory=8)

A schedule is data: for each rank its actions in order, which are forwards (`F`), backwards (`B`),
or backwards in two halves, of inputs (`I`) and of weights (`W`), of one stage and one microbatch.
It can be written as CSV in the form that `torch.distributed.pipelining` reads, and read from it.
Times and memory are in any units: those of `StageTimes`.
"""

from vescale_parallel._schedules.actions import Action, Schedule, from_csv, schedule_of
from vescale_parallel._schedules.check import check_schedule
from vescale_parallel._schedules.choice import (
    SCHEDULES,
    best_schedule,
    compare_schedules,
    make_schedule,
)
from vescale_parallel._schedules.pictures import as_svg, as_text
from vescale_parallel._schedules.tables import as_json, as_table, as_trace
from vescale_parallel._schedules.timeline import (
    Span,
    StageTimes,
    Timeline,
    simulate_schedule,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "Span",
    "StageTimes",
    "Timeline",
    "as_json",
    "as_svg",
    "as_table",
    "as_text",
    "as_trace",
    "best_schedule",
    "check_schedule",
    "compare_schedules",
    "from_csv",
    "make_schedule",
    "schedule_of",
    "simulate_schedule",
]
