"""Property: autograd knows of each write in place: a graph that saved the memory raises."""

import pytest
import torch
from vescale_comm import (
    all_gather_into_tensor,
    all_reduce_,
    broadcast_,
    reduce_scatter_tensor,
    simulate,
)
from vescale_comm.testing import run

# Name: what writes into the four elements it is given, on two ranks.
WRITES = {
    "all_reduce_": lambda x: all_reduce_(x),
    "all_reduce_, avg": lambda x: all_reduce_(x, op="avg"),
    "all_reduce_, max": lambda x: all_reduce_(x, op="max"),
    "all_reduce_, later": lambda x: all_reduce_(x, async_op=True).wait(),
    "all_reduce_, in order": lambda x: all_reduce_(x, order="rank"),
    "broadcast_": lambda x: broadcast_(x),
    "all_gather_into_tensor": lambda x: all_gather_into_tensor(x, torch.ones(2)),
    "all_gather_into_tensor, uneven": lambda x: all_gather_into_tensor(
        x, torch.ones(3 - 2 * torch.distributed.get_rank()), sizes=[3, 1]
    ),
    "reduce_scatter_tensor": lambda x: reduce_scatter_tensor(x, torch.ones(8)),
}


def saved_and_written(rank, world_size):
    for write in WRITES.values():
        weight, x = torch.ones(4, requires_grad=True), torch.ones(4)
        y = weight * x
        with torch.no_grad():
            write(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_memory_that_a_graph_saved_is_seen_to_change():
    run(saved_and_written, 2)
    simulate(2)(saved_and_written)


def reduced_for_inference(rank, world_size):
    with torch.inference_mode():
        return all_reduce_(torch.ones(2)).tolist()


def test_inference_tensors_which_count_no_writes_are_reduced():
    assert run(reduced_for_inference, 2) == [[2.0, 2.0]] * 2
