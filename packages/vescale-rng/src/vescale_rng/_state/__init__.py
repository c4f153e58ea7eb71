"""Reads, moves, saves and compares the positions of generators.

Reading guide:
    positions: `position`, `seek`, `at`, `advance`, and how far an op goes (`draws`, `skip`).
    json_state: the state of a generator as plain JSON (`get_state`, `set_state`).
    fingerprint: a number that differs where generators differ, to compare over ranks.
    agreement: whether the generators of all ranks are in the same state (`check_in_step`).
"""
