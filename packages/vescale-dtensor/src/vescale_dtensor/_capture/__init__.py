"""Capture ("static eager"): one run of a function on DTensors as a program of local calls.

How it works, in the order in which it happens:

- `call_key` makes the key of a call, from arguments that `records` takes apart and `global_state`.
  `misses` decides whether a call that no program stands for is recorded or only run.
- `named_state` finds what the code of the function names, before anything runs: `code_names` says
  what code names, `code_files` whose code counts, `kinds` what sort of thing an object is, and
  `free_tensors` which tensors were there before.
- `recorder` is the torch function mode under which the function runs once; `unsupported` is what it
  cannot record, `constants` which tensors Python may read, `regions` what backward makes again,
  `surroundings` the modes of the steps. `running_on` is what runs after a refusal, where that ends
  the recording and not the function (`refused="run"`), `nesting` which captured functions inside
  just run, or run on this rank alone.
- `graph` is the graph as it grows, and where its arguments come from; `outputs` how to return;
  `passes` removes what is not needed, `pinned_names` fixes what its code calls.
- `program` is the finished program: its guards (`free_tensors`, `module_guards`, `state_guard`,
  `leaf_uses`) and its replay. `listing` prints it.
- `comparisons` decides which replays are compared with the function; `replay_check` compares one:
  `changed_state` is what both write to, `histories` are their autograd graphs and gradients.

What the guards promise: what code names is compared at each call, and all else counts as constant.
What the recording itself changed (`own_changes`) is found by comparing with what was there before,
and such a recording is not kept.
"""

from vescale_dtensor._capture.capture import Captured, capture
from vescale_dtensor._capture.program import Program
from vescale_dtensor._capture.regions import checkpoint
from vescale_dtensor._capture.replay_check import ReplayCheck

__all__ = ["Captured", "Program", "ReplayCheck", "capture", "checkpoint"]
