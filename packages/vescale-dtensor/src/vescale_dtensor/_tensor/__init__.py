"""The wrapper itself: class `DTensor` as data.

- `dtensor` has the class: slots, what it answers from its spec, and `wrap`, which makes one.
- `state` is the one place where what a wrapper has cached is dropped, with the reason of each case.
- `copied_views` keeps views that had to be copies from being written to unnoticed.
- `observers` is the list of who watches (`explain`, `strict`).

What users call on a DTensor and needs more than this is in `_api/methods.py`.
"""
