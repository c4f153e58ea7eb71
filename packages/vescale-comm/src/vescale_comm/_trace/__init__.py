"""Records what was sent, from which line, and how long it took.

`trace` is the public function, and what it opens. It fills `record`s, which are shown as a `table`
or written for `perfetto`; `clock` aligns the ranks' clocks so that their traces can be merged. What
torch issues beside this package is `unrecorded_calls`, but counted, or has records by
`torch_calls`.
"""
