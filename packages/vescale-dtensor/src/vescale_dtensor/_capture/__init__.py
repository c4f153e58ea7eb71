"""Capture ("static eager"): one run of a function on DTensors as a program of local calls.

How it works, in the order in which it happens:

- `_entry` makes the key of a call, `_ambient` and `_modules` what else is guarded.
- `_recorder` is the torch function mode under which the function runs once; `_refusals` is what it
  cannot record, `_before` tells tensors from outside from those that were made behind its back.
- `_trace` is the graph as it grows, and where its arguments come from; `_outputs` how to return.
- `_program` is the finished thing: guards and replay. `_explain` prints it, `_check` compares it.
"""

from vescale_dtensor._capture.capture import Captured, capture
from vescale_dtensor._capture.program import Program

__all__ = ["Captured", "Program", "capture"]
