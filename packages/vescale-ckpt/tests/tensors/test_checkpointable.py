"""A plain tensor with the attributes of torch's CheckpointableTensor is saved and filled as the
shards that it tells of, padding around them left alone; attributes that do not fit are refused.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
import vescale_ckpt
from vescale_ckpt import StateError

WHOLE = torch.arange(15.0).view(5, 3)


def told(local, shape, begins, at, sizes):
    local.global_shape, local.global_offsets = shape, begins
    local.local_offsets, local.local_sizes = at, sizes
    return local


def halves(fill):
    """Both column blocks of a 5x3 tensor, the second one first, each behind a row of padding."""
    local = torch.full((6, 3), -1.0)
    if fill:
        local[1:, :1], local[1:, 1:] = WHOLE[:, 2:], WHOLE[:, :2]
    return told(local, (5, 3), ((0, 2), (0, 0)), ((1, 0), (1, 1)), ((5, 1), (5, 2)))


def test_shards_of_one_tensor(path):
    vescale_ckpt.save(path, {"w": halves(fill=True)})
    assert torch.equal(vescale_ckpt.load(path, {"w": torch.zeros(5, 3)})["w"], WHOLE)


def test_filled_in_place(path):
    vescale_ckpt.save(path, {"w": WHOLE})
    into = halves(fill=False)
    vescale_ckpt.load(path, {"w": into})
    assert torch.equal(into, halves(fill=True))


def test_rows_of_a_larger_checkpoint(path):
    vescale_ckpt.save(path, {"w": WHOLE})
    rows = told(torch.zeros(2, 3), (5, 3), ((3, 0),), ((0, 0),), ((2, 3),))
    assert torch.equal(vescale_ckpt.load(path, {"w": rows})["w"], WHOLE[3:])


def test_torch_agrees(path):
    """Where torch knows the protocol, it calls the same tensors CheckpointableTensors."""
    known = getattr(dcp, "CheckpointableTensor", None)
    if known is None:
        pytest.skip("torch knows no CheckpointableTensor before 2.14")
    assert isinstance(halves(fill=True), known)


BROKEN = [
    ({"local_sizes": ((5, 1), (6, 2))}, r"shard of \(6, 2\) at \(1, 1\)"),
    ({"local_offsets": ((1, 1), (1, 2))}, r"shard of \(5, 2\) at \(1, 2\)"),
    ({"global_offsets": ((0, 2),)}, "1 global_offsets, 2 local_offsets"),
    ({"global_offsets": ((0, 3), (0, 0))}, "outside the global shape"),
    ({"global_shape": (5,)}, "does not have the 1 dims"),
    ({"global_shape": None}, r"not \['global_shape'\]"),
]


@pytest.mark.parametrize(("broken", "said"), BROKEN)
def test_what_does_not_fit_is_refused(path, broken, said):
    tensor = halves(fill=True)
    for name, value in broken.items():
        setattr(tensor, name, value)
        if value is None:
            delattr(tensor, name)
    with pytest.raises(StateError, match=said):
        vescale_ckpt.save(path, {"w": tensor})
