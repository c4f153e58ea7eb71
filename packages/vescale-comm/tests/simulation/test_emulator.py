"""Property: an `Emulator`'s results and errors are those of the functions that it emulates."""

import pytest
import torch
from vescale_comm import CommArgumentError, Emulator

BOTH = Emulator(2)


@pytest.mark.parametrize("pairs", [[(5, 0)], [(0, -1)], [(0, 1, 2)], [0], [(0, 1), (0, 0)]])
def test_permute_refuses_pairs_in_words(pairs):
    with pytest.raises(CommArgumentError, match="permute"):
        BOTH.permute([torch.ones(2)] * 2, pairs=pairs)


@pytest.mark.parametrize(
    "call", [BOTH.all_reduce, BOTH.all_gather, BOTH.reduce_scatter, BOTH.broadcast]
)
def test_results_with_gradients_are_written_in_place(call):
    def gradients(change):
        inputs = [torch.ones(4, requires_grad=True) for _ in range(2)]
        sum(change(each).sum() for each in call(inputs)).backward()
        return [each.grad.tolist() for each in inputs]

    assert gradients(lambda x: x.mul_(2)) == gradients(lambda x: x * 2)
