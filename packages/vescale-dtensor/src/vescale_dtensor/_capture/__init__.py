"""Capture ("static eager"): one run of a function on DTensors as a program of local calls.

- `capture` is the function that users call: it looks for a program that stands for a call, replays
  it, or records another one. `nesting` says what captured functions inside of others do.
- `guard`: what a call depends on, and whether that is what it was.
- `record`: how a run becomes a graph, and what is refused.
- `replay`: programs, and their comparison with the function.

What the guards promise: what code names is compared at each call, and all else counts as constant.
What the recording itself changed (`own_changes`) is found by comparing with what was there before,
and such a recording is not kept.
"""

from vescale_dtensor._capture.capture import Captured, capture
from vescale_dtensor._capture.record.regions import checkpoint
from vescale_dtensor._capture.replay.program import Program
from vescale_dtensor._capture.replay.replay_check import ReplayCheck

__all__ = ["Captured", "Program", "ReplayCheck", "capture", "checkpoint"]
