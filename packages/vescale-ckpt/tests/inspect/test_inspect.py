"""`inspect` tells what was saved: shapes, boxes, files, values, and what is in tensors."""

import math

import pytest
import torch
from edited_checkpoint import damage, generation_of
from emulated_ranks import save_on, sharded, succeed
from vescale_ckpt import CorruptError, NotFoundError, RankLocal, Statistics, inspect, save
from vescale_ckpt._tensors.dtypes import STORED_AS, torch_dtype


def test_boxes_files_and_values(path):
    pieces = sharded(torch.arange(12.0).view(4, 3), 2)
    states = [
        {"w": piece, "nested": {"step": 7, "rate": 0.5}, "own": RankLocal(rank)}
        for rank, piece in enumerate(pieces)
    ]
    succeed(save_on(states, path))
    found = inspect(path)
    assert (found.path, found.generation) == (path, generation_of(path).name)
    assert found.values["nested/step"] == 7
    assert found.values["nested/rate"] == 0.5
    assert found.values["own"].values == (0, 1)
    assert found.provenance["world_size"] == 2
    assert found.nbytes == sum(file.stat().st_size for file in generation_of(path).glob("r*"))
    tensor = found.tensors["w"]
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("float32", (4, 3), 48)
    assert [(c.offset, c.shape, c.nbytes) for c in tensor.chunks] == [
        ((0, 0), (2, 3), 24), ((2, 0), (2, 3), 24),
    ]  # fmt: skip
    for chunk, first in zip(tensor.chunks, (0.0, 6.0), strict=True):
        content = (generation_of(path) / chunk.file).read_bytes()[chunk.start :][: chunk.nbytes]
        assert torch.frombuffer(bytearray(content), dtype=torch.float32)[0] == first
    assert tensor.statistics is None


def test_globs_choose_tensors_and_values(path):
    save(path, {"a": {"w": torch.ones(2), "n": 1}, "b": {"w": torch.ones(3), "n": 2}})
    found = inspect(path, only=["a/*", "*/n"])
    assert list(found.tensors) == ["a/w"]
    assert found.values == {"a/n": 1, "b/n": 2}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", sorted(STORED_AS))
def test_statistics_of_every_dtype(path, dtype):
    values = torch.tensor([1, 0, 1, 1, 1], dtype=torch.float32).to(torch_dtype(dtype))
    save(path, {"x": values, "empty": values[:0]})
    found = inspect(path, statistics=True).tensors
    x, empty = found["x"].statistics, found["empty"].statistics
    assert x.first == tuple(values[:4].tolist())
    assert empty == Statistics(())
    if values.is_complex():
        assert x.least is None
    else:
        wide = values.double()
        assert (x.least, x.largest) == (wide.min(), wide.max())
        assert x.mean == wide.mean()
        assert x.not_finite == 0


def test_what_is_not_finite_and_what_a_float_cannot_hold(path):
    odd = torch.tensor([1.0, math.nan, math.inf])
    save(path, {"odd": odd, "large": torch.tensor([2**53 + 1, -(2**62) - 1])})
    found = inspect(path, statistics=True).tensors
    assert found["odd"].statistics.not_finite == 2
    assert math.isnan(found["odd"].statistics.largest)
    assert found["large"].statistics.largest == 2**53 + 1
    assert found["large"].statistics.least == -(2**62) - 1


def test_damage_is_an_error(path, tmp_path):
    save(path, {"x": torch.ones(100)})
    damage(path)
    assert inspect(path).tensors["x"].nbytes == 400  # no tensor is read
    with pytest.raises(CorruptError, match="'x'"):
        inspect(path, statistics=True)
    with pytest.raises(NotFoundError):
        inspect(tmp_path / "none")
