"""Property: a tensor that knows its layout is filled without being told it."""

from types import SimpleNamespace

import pytest
import torch
from rng_pieces import Shard
from vescale_rng import Bernoulli, LayoutError, Normal, fill_, layout_of, layout_of_tensor, whole


class Wrapper:
    """The least that the protocol asks for, sharing no class with this package."""

    def __init__(self, local, layout):
        self._local = local
        self._layout = layout

    def __vescale_layout__(self):
        boxes = [SimpleNamespace(**vars(box)) for box in self._layout.boxes]
        return SimpleNamespace(global_shape=self._layout.global_shape, boxes=boxes, replica=(0, 1))

    def to_local(self):
        return self._local


@pytest.mark.smoke
def test_an_object_of_the_protocol():
    torch.manual_seed(6)
    expected = torch.randn(10, 6)
    after = torch.get_rng_state()
    for index in range(4):
        layout = layout_of((10, 6), [Shard(0)], (4,), (index,))
        piece = Wrapper(torch.empty(layout.local_shape), layout)
        torch.manual_seed(6)
        assert fill_(piece, Normal()) is piece
        assert torch.equal(piece.to_local(), expected[3 * index : 3 * index + 3])
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("make", [
    lambda: torch.empty(5, 7),
    lambda: torch.empty(7, 5).t(),
    lambda: torch.empty(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last),
    lambda: torch.empty(()),
    lambda: torch.empty(0, 3),
    lambda: torch.empty(1, 40).t(),
])  # fmt: skip
def test_a_plain_tensor_is_whole(make):
    torch.manual_seed(6)
    expected = make().normal_()
    after = torch.get_rng_state()
    torch.manual_seed(6)
    assert torch.equal(fill_(make(), Normal()), expected)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_plain_tensor_with_gaps_has_no_layout():
    with pytest.raises(LayoutError, match="does not fill its memory"):
        fill_(torch.empty(4, 6)[:, :3], Normal())
    # Told the layout, it is filled where it lies.
    torch.manual_seed(6)
    expected = torch.randn(4, 3)
    torch.manual_seed(6)
    base = torch.zeros(4, 6)
    piece = base[:, :3]
    strided = layout_of((4, 3), [], (), ())
    box = strided.boxes[0]
    box = SimpleNamespace(**{**vars(box), "local_strides": (6, 1)})
    fill_(piece, Normal(), SimpleNamespace(global_shape=(4, 3), boxes=[box]))
    assert torch.equal(piece, expected)
    assert not base[:, 3:].any()


def test_a_whole_layout_says_where_everything_is():
    assert layout_of_tensor(torch.empty(3, 4)) == whole((3, 4))


def test_gradients_as_with_torchs_own_random_methods():
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        fill_(x, Bernoulli(0.5), whole((4,)))
    y = x * 2
    fill_(y, Bernoulli(0.5), whole((4,)))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.zeros(4))
    with torch.no_grad():
        assert fill_(x, Bernoulli(0.5), whole((4,))) is x


def test_a_fill_is_seen_by_autograds_version_check():
    x = torch.ones(4, requires_grad=True)
    y = x.exp()
    with torch.no_grad():
        fill_(y, Normal(), whole((4,)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
