"""What an operation passes through is counted, and is little from the second call on."""

import subprocess
import sys

from tools import walks


def test_calls_of_other_packages_are_not_counted():
    import vescale_dtensor as vd

    def hook(*seen):
        return None

    before = sys.gettrace()
    sys.settrace(hook)
    try:
        assert walks.walk(lambda: walks.Walk(())).files == ()
        assert "_layout/placements.py" in walks.walk(lambda: repr(vd.Shard(0))).files
        assert sys.gettrace() is hook
    finally:
        sys.settrace(before)


def test_files_and_rooms_are_counted_once_each():
    one = walks.Walk(("_layout/spec.py", "_layout/mesh.py", "_layout/spec.py", "_errors.py"))
    assert str(one) == "4 calls, 3 files, 2 rooms"


def test_second_calls_are_short():
    command = [sys.executable, "-m", "tools.walks"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = {}
    for line in done.stdout.splitlines():
        where, counts = line.split(" call ")
        number, calls = counts.split(" calls")[0].split(":")
        found[where.strip(), int(number)] = int(calls)
    names = {name for name, _ in found}
    assert names == {"x + y", "linear(x, w)", "redistribute S -> R", "capture(linear, gelu)"}
    # Counts of what a call does, which no machine and no load changes.
    # Of a first call, what it was before the package had rooms: on 3.12 and later fewer, as
    # comprehensions are no calls there.
    for name, most in (("x + y", 295), ("linear(x, w)", 312), ("redistribute S -> R", 521)):
        assert 100 < found[name, 1] <= most
    for name, most in (("x + y", 3), ("linear(x, w)", 6), ("redistribute S -> R", 20)):
        assert found[name, 2] == found[name, 10] <= most
    assert found["capture(linear, gelu)", 2] < found["capture(linear, gelu)", 1] / 10
