"""In real processes, from a checkpoint to other ranks: the bits of one rank."""

from invariance_table import resumed, trained


def test_two_ranks_then_three_are_one() -> None:
    assert resumed((2, 3), (3, 1), True) == trained((1, 0), False)
