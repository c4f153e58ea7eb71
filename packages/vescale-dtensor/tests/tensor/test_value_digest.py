"""Digests are of a tensor's bytes: equal for equal values, whatever their memory looks like."""

import pytest
import torch
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


def test_nothing_has_a_digest_whatever_its_stride():
    assert digest(torch.empty_strided((0,), (4,))).tolist() == [0]
