"""Pipeline schedules as data: who computes what in which order, checked and timed on paper.

- `actions`: one step of one rank, and the schedule that is made of them; CSV both ways.
- `orders`: those that are written down: GPipe, 1F1B, interleaved, ZB-H1, ZBV, DualPipeV.
- `greedy`: schedules that are found by a rule for given times, under a bound on memory.
- `check`: whether a schedule computes everything once, and ends.
- `timeline`: when each action runs, for given times of stages; bubble, memory, messages.
- `choice`: all of them compared, and the best that fits.
- `tables`: tables and traces. `pictures`: SVG, and letters for terminals.
"""
