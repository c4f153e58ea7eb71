"""Digests are of a tensor's bytes: equal for equal values, whatever their memory looks like."""

import pytest
import torch
from vescale_dtensor._tensor import value_digest
from vescale_dtensor._tensor.value_digest import digest

STRIDED = {
    "transposed": lambda x: x.t().contiguous().t(),
    "a slice": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (4, 0)])
@pytest.mark.parametrize("kind", STRIDED)
def test_strides_do_not_matter(kind, shape):
    x = torch.randn(shape)
    assert torch.equal(digest(STRIDED[kind](x)), digest(x))


def test_nothing_and_one_element_have_a_digest_whatever_their_stride():
    assert digest(torch.empty_strided((0,), (4,))).tolist() == [0]
    assert torch.equal(digest(torch.ones(2)[::2]), digest(torch.ones(1)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.uint8])
@pytest.mark.parametrize("part", [1, 3, 64])
def test_the_parts_that_it_is_computed_in_do_not_matter(monkeypatch, dtype, part):
    x = (torch.randn(131) * 9).to(dtype)
    # At places of memory where no word begins, too.
    expected = [digest(x[at:].clone()) for at in range(4)]
    assert len({one.item() for one in expected}) == 4
    monkeypatch.setattr(value_digest, "_PART", part)
    assert all(torch.equal(digest(x[at:]), one) for at, one in enumerate(expected))


def test_numbers_on_a_device_are_read_by_one_copy(monkeypatch):
    numbers = [torch.tensor(float(at)) for at in range(4)]

    def one_by_one(self):
        raise AssertionError("read by itself")

    monkeypatch.setattr(torch.Tensor, "item", one_by_one)
    assert value_digest._items(numbers) == [0.0, 1.0, 2.0, 3.0]
    # Of other dtypes they are other numbers when they are put together.
    assert value_digest._items([*numbers, torch.tensor(1)]) == []
