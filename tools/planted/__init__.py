"""Plants faults in copies of the packages' sources, and says which the tests of their room find.

    python -m tools.planted                      # all, by the tests that run on a change
    python -m tools.planted --package comm --room _engine
    python -m tools.planted --only NAME --all-cases
    python -m tools.planted --clean              # without a fault: all must pass

A fault is data, in the table of its package (`rng.toml`, ...): what text becomes which other text
in which file, and which tests are to notice. They are of the kinds that are made by hand and
passed by eye: a sign, a reduction left out, an offset by one, a guard that no longer raises.
A choice of tests that finds fewer of them than another has lost something.
"""
