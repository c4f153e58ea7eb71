"""Property: boxes at equal distances are copied as one, and a window never has more than needed."""

import pytest
from rng_pieces import Shard
from vescale_rng import layout_of
from vescale_rng._layout.fill_plan import fill_plan_of
from vescale_rng._layout.strided_runs import strided_runs


@pytest.mark.parametrize(
    ("shape", "placement", "boxes"),
    [
        ((64, 1024), Shard(1, blocks=64), 64),
        ((1024, 64), Shard(0, blocks=64), 64),
        ((16, 64, 16), Shard(1, blocks=16), 16),
    ],
)
def test_one_copy_for_many_boxes(shape, placement, boxes):
    layout = layout_of(shape, [placement], (4,), (1,))
    assert len(layout.boxes) == boxes
    plan = fill_plan_of(layout, layout.local_shape, layout.boxes[0].local_strides)
    assert [len(window.pieces) for window in plan.windows()] == [1]


def test_steps_are_equal_and_go_forward():
    def find(*places):
        found = strided_runs(places, lambda _: 0, lambda p: p[0], lambda p: p[1])
        return [(thing[0], count) for thing, count, _, _ in found]

    assert find((0, 0), (4, 2), (8, 4), (12, 6)) == [(0, 4)]
    assert find((8, 4), (0, 0), (4, 2)) == [(0, 3)]
    assert find((0, 0), (4, 2), (9, 4)) == [(0, 2), (9, 1)]
    # Listed backwards in the local tensor: no strides reach that.
    assert find((0, 4), (4, 2), (8, 0)) == [(0, 1), (4, 1), (8, 1)]
    assert find() == []
