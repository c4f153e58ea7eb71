"""What an operation passes through is counted."""

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
