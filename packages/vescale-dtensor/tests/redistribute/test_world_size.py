"""Nothing that is done at every call grows with the number of ranks: calls are counted, not timed.

One process on torch's fake process group; 16 and 256 ranks. A loop over ranks in Python shows as
more function calls.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COUNTING = """
import gc, json, sys
gc.disable()  # a collection runs hooks, which are no part of a call
sys.path.insert(0, {folder!r})
from _world_case import mesh_of, operations

def calls_of(call):
    call(), call(), call()  # planned, and compiled
    seen = []
    sys.setprofile(lambda frame, event, arg: event in ("call", "c_call") and seen.append(event))
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(seen)

print(json.dumps({{name: calls_of(call) for name, call in operations(mesh_of({world}))}}))
"""


def counts(world):
    code = COUNTING.format(folder=str(BENCHMARKS), world=world)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="installed without the benchmarks")
def test_a_call_does_as_much_on_256_ranks_as_on_16():
    few, many = counts(16), counts(256)
    # Fewer, where dims that 256 ranks cannot divide are gathered.
    grown = {name: (few[name], many[name]) for name in few if many[name] > few[name]}
    assert not grown
