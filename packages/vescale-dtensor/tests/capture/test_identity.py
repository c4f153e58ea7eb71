"""Which of two equal objects a captured function gets, and gives, is as in eager mode."""

import torch
import vescale_dtensor as vd
from capture_guards import rows, spread
from vescale_comm.testing import on_ranks

HELD = [2.0]


@on_ranks(2)
def test_lists_among_the_arguments_are_told_apart_where_code_asks():
    def function(x, one, two):
        return x * (1 + (one is two) + 2 * (one is HELD))

    captured = vd.capture(function)
    shared = [2.0]
    for _ in range(2):
        for one, two, factor in (
            (shared, shared, 2),
            ([2.0], [2.0], 1),
            (HELD, [2.0], 3),
            (HELD, HELD, 4),
            (shared, shared, 2),
        ):
            found = captured(spread(rows()), one, two).full_tensor()
            assert torch.equal(found, rows() * factor)
    assert len(captured.programs) == 4


@on_ranks(2)
def test_lists_count_by_contents_where_no_code_asks():
    captured = vd.capture(lambda x, items: x * items[0] + HELD[0])
    for items in (HELD, [2.0], HELD, [2.0]):
        assert torch.equal(captured(spread(rows()), items).full_tensor(), rows() * 2 + 2)
    assert len(captured.programs) == 1


@on_ranks(2)
def test_a_tensor_that_is_returned_twice_is_one():
    def function(x):
        y, plain = x * 2, x.to_local() * 3
        return y, {"again": y}, plain, [plain]

    captured = vd.capture(function)
    for _ in range(3):
        one, two, three, four = captured(spread(rows()))
        assert one is two["again"]
        assert three is four[0]
        assert torch.equal(one.full_tensor(), rows() * 2)
        assert torch.equal(three, spread(rows()).to_local() * 3)
    assert len(captured.programs) == 1
