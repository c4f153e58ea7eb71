"""What is no argument is refused with the argument's name, and nothing is drawn.

Above all: what has no `dim` counts as replicated, so a number or a string among the placements
would give every rank the whole tensor.
"""

import numpy as np
import pytest
import torch
import vescale_rng as rng
from vescale_rng import Box, Normal, RngError, ShardLayout, layout_of


class Shard:
    dim = 0


LAYOUT = layout_of((6, 4), [Shard()], (2,), (0,))
LOCAL = torch.zeros(3, 4)
BOX = Box((0, 0), (3, 4), 0, (4, 1))

CALLS = {
    "a string as distribution": (lambda: rng.fill_(LOCAL, "normal", LAYOUT), "`distribution`"),
    "a class as distribution": (lambda: rng.fill_(LOCAL, Normal, LAYOUT), "`distribution`"),
    "a shape as layout": (lambda: rng.fill_(LOCAL, Normal(), [6, 4]), "`layout`"),
    "a string as layout": (lambda: rng.dropout(LOCAL, 0.5, "rows"), "`layout`"),
    "a list as local": (lambda: rng.fill_([1.0], Normal(), LAYOUT), "`local`"),
    "a list as local, alone": (lambda: rng.fill_([1.0], Normal()), "`local`"),
    "a number as generator": (lambda: rng.fill_(LOCAL, Normal(), LAYOUT, 3), "`generator`"),
    "p as text": (lambda: rng.dropout(LOCAL, "0.5", LAYOUT), "got p='0.5'"),
    "a place of another kind": (lambda: rng.seek("start"), "`place`"),
    "one placement": (lambda: layout_of((6, 4), Shard(), (2,), (0,)), "`placements`"),
    "numbers as placements": (lambda: layout_of((6, 4), [0], (2,), (0,)), "`placements`: .*axis 0"),
    "tuples as placements": (lambda: layout_of((6, 4), [(0,)], (2,), (0,)), "`placements`"),
    "text as placements": (lambda: layout_of((6, 4), ["S"], (2,), (0,)), "`placements`"),
    "None as placement": (lambda: layout_of((6, 4), [None], (2,), (0,)), "`placements`"),
    "classes as placements": (lambda: layout_of((6, 4), [Shard], (2,), (0,)), "`placements`"),
    "one extent": (lambda: layout_of(6, [Shard()], (2,), (0,)), "`global_shape`"),
    "text as extents": (lambda: layout_of("64", [Shard()], (2,), (0,)), "`global_shape`"),
    "halves as extents": (lambda: layout_of((6.5, 4), [Shard()], (2,), (0,)), "`global_shape`"),
    "one mesh extent": (lambda: layout_of((6, 4), [Shard()], 2, (0,)), "`mesh_shape`"),
    "one coordinate": (lambda: layout_of((6, 4), [Shard()], (2,), 0), "`coordinate`"),
    "one box": (lambda: ShardLayout((6, 4), BOX), "`boxes`"),
    "tuples as boxes": (lambda: ShardLayout((6, 4), [((0, 0), (3, 4), 0, (4, 1))]), "`boxes`"),
    "a box without extents": (lambda: Box((0, 0), 3, 0, (4, 1)), "`shape`"),
    "whole of a number": (lambda: rng.whole(6), "`shape`"),
}


@pytest.mark.parametrize("what", CALLS)
def test_the_argument_is_named(what):
    call, said = CALLS[what]
    before = torch.get_rng_state()
    with pytest.raises(RngError, match=said):
        call()
    assert torch.equal(torch.get_rng_state(), before)
    assert not LOCAL.any()


def test_lists_are_as_good_as_tuples():
    by_lists = ShardLayout([6, 4], [Box([0, 0], [3, 4], 0, [4, 1])])
    assert by_lists == ShardLayout((6, 4), (BOX,))
    assert hash(by_lists) == hash(ShardLayout((6, 4), (BOX,)))
    torch.manual_seed(0)
    expected = torch.empty(6, 4).normal_()
    torch.manual_seed(0)
    assert torch.equal(rng.fill_(torch.empty(3, 4), Normal(), by_lists), expected[:3])


def test_other_numbers_are_extents_too():
    shape, mesh = np.array([6, 4]), torch.Size([2])
    assert layout_of(shape, [Shard()], mesh, (np.int64(0),)) == LAYOUT


class Buffer:
    """Somebody's array: it has DLPack, and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("policy", ["native", "portable"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_arrays_and_dlpack_are_filled_in_place(policy, dtype):
    with rng.use(policy):
        torch.manual_seed(0)
        tensor = rng.fill_(torch.from_numpy(np.empty((3, 4), dtype)), Normal(), LAYOUT)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        array = np.empty((3, 4), dtype)
        assert rng.fill_(array, Normal(), LAYOUT) is array
        assert np.array_equal(array, tensor.numpy())
        assert torch.equal(torch.get_rng_state(), state)
        memory = torch.empty_like(tensor)
        torch.manual_seed(0)
        rng.fill_(Buffer(memory), Normal(), LAYOUT)
        assert torch.equal(memory, tensor)
        # A layout of their own: whole arrays, and one in columns.
        torch.manual_seed(0)
        one = rng.fill_(np.empty((6, 4), dtype), Normal())
        assert np.array_equal(one[:3], array)
        columns = layout_of((6, 4), [Shard()], (2,), (1,), local_strides=(1, 3))
        torch.manual_seed(0)
        part = rng.fill_(np.empty((3, 4), dtype, order="F"), Normal(), columns)
        assert np.array_equal(part, one[3:])


def test_memory_that_cannot_be_filled():
    frozen = np.zeros((3, 4))
    frozen.flags.writeable = False
    with pytest.raises(RngError, match=r"`local`: this numpy\.ndarray is read-only"):
        rng.fill_(frozen, Normal(), LAYOUT)
    with pytest.raises(RngError, match="`local`: torch cannot share"):
        rng.fill_(np.zeros((3, 4))[::-1], Normal(), LAYOUT)
    with pytest.raises(RngError, match="`local`: torch cannot share"):
        rng.fill_(np.array(["a"]), Normal(), LAYOUT)
