"""A picture shows which ranks hold which part, in any number of dims, without communication."""

import sys
from collections import Counter
from xml.etree import ElementTree

import pytest
import vescale_dtensor as vd
from vescale_comm import simulate, trace
from vescale_comm.testing import device_mesh, on_ranks, run
from vescale_dtensor import LayoutError, Partial, RaggedShard, Replicate, Shard

EXPECTED = """\
f32[6@dp, 4@tp] on mesh(dp=2, tp=2)
  dp: Shard(0)
  tp: Shard(1)

                 0:2                      2:4             dim 1
dim 0 ┌────────────────────────┬────────────────────────┐
      │                        │                        │
      │                        │                        │
  0:3 │           0            │           1            │
      │                        │                        │
      ├────────────────────────┼────────────────────────┤
      │                        │                        │
      │                        │                        │
  3:6 │           2            │           3            │
      │                        │                        │
      └────────────────────────┴────────────────────────┘

cells name the ranks that hold them"""

# Shape, placements on dp and tp, dims to draw; then the words in the cells, and in the notes.
LAYOUTS = {
    "scalar": ((), (Partial(), Replicate()), None, ["0+2 = 1+3"], ["equal copies"]),
    "partial twice": ((2,), (Partial("max"), Partial()), None, ["max(0+1, 2+3)"], []),
    "uneven": ((5, 3), (Shard(0), Shard(0)), None, ["0", "1", "2", "3"], []),
    "empty": ((1, 4), (Shard(0), Replicate()), None, ["0, 1"], ["without elements: 2, 3"]),
    "no elements": ((0, 4), (Shard(0), Replicate()), None, [], ["without elements: 0-3"]),
    "ragged": ((9,), (Replicate(), RaggedShard((0,), (1, 2))), None, ["0, 2", "1, 3"], []),
    "whole": ((4, 4, 4), (Replicate(), Replicate()), None, ["0-3"], []),
    "slices": ((4, 2, 8), (Shard(0), Shard(2)), (1, 2), ["0", "1", "2", "3"], []),
    "one dim": ((4, 8), (Shard(0), Shard(1)), [-1], ["0", "1", "2", "3"], []),
    "four dims": ((2, 2, 2, 2), (Shard(1), Shard(3)), None, ["0", "1", "2", "3"], []),
}


def drawn(rank, world, shape, placements, dims):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    tensor = vd.zeros(shape, device_mesh=mesh, placements=placements)
    with trace() as traced:
        pictures = [vd.visualize(tensor, dims=dims, format=kind) for kind in ("text", "svg")]
    assert traced.counts() == {}
    return pictures


def test_a_matrix_as_text():
    for text, _ in run(drawn, 4, (6, 4), (Shard(0), Shard(1)), None):
        assert text == EXPECTED


@pytest.mark.parametrize("name", LAYOUTS)
def test_cells_name_their_holders(name):
    shape, placements, dims, cells, notes = LAYOUTS[name]
    pictures = run(drawn, 4, shape, placements, dims)
    assert all(picture == pictures[0] for picture in pictures)
    text, svg = pictures[0]
    written = [cell.strip() for line in text.splitlines() for cell in line.split("│")[1:-1]]
    assert sorted(cell for cell in written if cell) == cells
    assert all(note in text for note in notes)
    texts = (e for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("text"))
    in_svg = ["".join(e.itertext()) for e in texts]
    assert all(cell in in_svg for cell in cells)
    assert all(any(note in line for line in in_svg) for note in notes)


def test_slices_of_other_dims_have_titles():
    shape, placements, dims, *_ = LAYOUTS["slices"]
    text, svg = run(drawn, 4, shape, placements, dims)[0]
    for title in ("[0:2, :, :]", "[2:4, :, :]"):
        assert title in text
        assert title in svg


@on_ranks(4)
def test_what_cannot_be_drawn_is_an_error():
    mesh = device_mesh((2, 2), ("dp", "tp"))
    tensor = vd.zeros(4, 4, device_mesh=mesh, placements=[Shard(0), Replicate()])
    for wrong in ({"dims": (0, 2)}, {"dims": ()}, {"dims": (1, -1)}, {"format": "png"}):
        with pytest.raises(LayoutError, match="visualize"):
            vd.visualize(tensor, **wrong)
    with pytest.raises(LayoutError, match="expected a DTensor"):
        vd.visualize(tensor.to_local())


def calls_of_a_picture(rank, world_size):
    mesh = vd.init_device_mesh("cpu", (world_size,))
    x = vd.zeros(2 * world_size, device_mesh=mesh, placements=[Shard(0)])
    str(vd.visualize(x))
    found = Counter()
    sys.setprofile(lambda frame, event, argument: found.update([event]))
    try:
        str(vd.visualize(x))
    finally:
        sys.setprofile(None)
    return found["call"]


def test_the_cost_of_a_picture_grows_with_the_ranks_and_not_with_their_square():
    few, many = (simulate(count)(calls_of_a_picture)[0] for count in (16, 64))
    assert few > 16
    assert many < 6 * few
