"""Capture ("static eager"): one run of a function on DTensors as a program of local calls.

How it works, in the order in which it happens:

- `call_key` makes the key of a call, `global_state`, `module_guards` and `name_guards` what else is
  guarded.
- `recorder` is the torch function mode under which the function runs once; `unsupported` is what it
  cannot record, `preexisting` tells tensors from outside from those that were made unseen.
- `graph` is the graph as it grows, and where its arguments come from; `outputs` how to return;
  `passes` removes what is not needed, `fx_compile` makes Python of it.
- `program` is the finished thing: guards and replay. `listing` prints it, `replay_check` compares
  its results with those of the function itself.
"""

from vescale_dtensor._capture.capture import Captured, capture
from vescale_dtensor._capture.program import Program

__all__ = ["Captured", "Program", "capture"]
