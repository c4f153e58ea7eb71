"""The wrapper class `DTensor` as data, and the state that it keeps.

- `dtensor` has the class (slots, and the metadata that it answers from its spec) and `wrap`, which
  makes wrappers.
- `state` is the one place where cached state of a wrapper is dropped, with the reason for each
  case.
- `copied_views` refuses writes to views that had to be copies, and to their bases.
- `lineage` is one number for the calls that made a tensor, to be compared over ranks.
- `observers` is the list of observers (`explain`, `strict`) and how they are notified.
- `fork_check` refuses to use DTensors in processes that a rank has forked.

Methods that need more than the class itself are in `_api/methods.py`.
"""
