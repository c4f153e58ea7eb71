"""Any layout loads into any other, on any number of ranks, bit for bit, reading what it needs."""

import json
import math

import pytest
import torch
from emulated_ranks import (
    Piece,
    PieceBox,
    PieceLayout,
    assert_filled,
    bits,
    load_on,
    piece_of,
    save_on,
    sharded,
    succeed,
)
from hypothesis import given
from hypothesis import strategies as st
from resharding import CountingStorage, layouts
from vescale_ckpt import load, read
from vescale_ckpt._format import checksums


@pytest.mark.parametrize("saved_by", [1, 2, 3, 4, 8])
def test_every_layout_to_every_layout(path, saved_by):
    torch.manual_seed(saved_by)
    wholes = {"even": torch.randn(12, 8), "uneven": torch.randn(7, 5), "few": torch.randn(2, 3)}
    saved = {
        f"{size} {kind}": pieces
        for size, whole in wholes.items()
        for kind, pieces in layouts(whole, saved_by, gap=1).items()
    }
    succeed(save_on([{k: p[r] for k, p in saved.items()} for r in range(saved_by)], path))
    for loaded_by in (1, 2, 3, 8):
        for wanted in ("rows", "columns", "interleaved", "ragged", "both dims"):
            empty = {
                name: layouts(wholes[name.split()[0]], loaded_by, gap=2, fill=False).get(wanted)
                for name in saved
            }
            if None in empty.values():
                continue
            succeed(load_on([{k: p[r] for k, p in empty.items()} for r in range(loaded_by)], path))
            for name, pieces in empty.items():
                for piece in pieces:
                    assert_filled(piece, wholes[name.split()[0]])
    for name, value in read(path).items():
        assert bits(value).equal(bits(wholes[name.split()[0]]))


@st.composite
def cut_boxes(draw, shape):
    """A random guillotine cut of a tensor into boxes."""
    boxes, queue = [], [((0,) * len(shape), shape)]
    while queue:
        offset, size = queue.pop()
        dims = [d for d, n in enumerate(size) if n > 1]
        if not dims or len(boxes) + len(queue) > 6 or draw(st.booleans()):
            boxes.append((offset, size))
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, size[dim] - 1))
        low = tuple(at if d == dim else n for d, n in enumerate(size))
        high = tuple(n - at if d == dim else n for d, n in enumerate(size))
        queue.append((offset, low))
        queue.append((tuple(o + at * (d == dim) for d, o in enumerate(offset)), high))
    return boxes


@given(data=st.data())
def test_random_boxes_to_random_boxes(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple))
    whole = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    path = f"{tmp_path_factory.mktemp('random')}/step"

    def spread(ranks, fill):
        owners = [[] for _ in range(ranks)]
        for box in data.draw(cut_boxes(shape)):
            owners[data.draw(st.integers(0, ranks - 1))].append(box)
        return [piece_of(whole, boxes, gap=1, fill=fill) for boxes in owners]

    succeed(save_on([{"x": p} for p in spread(data.draw(st.integers(1, 3)), True)], path))
    wanted = spread(data.draw(st.integers(1, 3)), False)
    succeed(load_on([{"x": p} for p in wanted], path))
    for piece in wanted:
        assert_filled(piece, whole)


def test_transposed_local_memory(path):
    whole = torch.arange(20.0).reshape(4, 5)
    box = PieceBox((0, 0), (4, 5), 0, (1, 4))
    saved = Piece(whole.t().contiguous().reshape(-1), PieceLayout((4, 5), (box,)))
    succeed(save_on([{"x": saved}], path))
    assert read(path)["x"].equal(whole)
    into = Piece(torch.zeros(20), PieceLayout((4, 5), (box,)))
    succeed(load_on([{"x": into}], path))
    assert into.local.equal(saved.local)


def test_local_tensor_with_a_storage_offset(path):
    buffer = torch.arange(10.0)
    layout = PieceLayout((4,), (PieceBox((0,), (2,), 1, (1,)), PieceBox((2,), (2,), 4, (1,))))
    succeed(save_on([{"x": Piece(buffer[3:], layout)}], path))
    assert read(path)["x"].tolist() == [4, 5, 7, 8]
    target = torch.zeros(10)
    load(path, into={"x": Piece(target[2:], layout)})
    assert target.tolist() == [0, 0, 0, 4, 5, 0, 7, 8, 0, 0]


def test_reading_a_part_reads_that_part(path):
    whole = torch.arange(4_000_000, dtype=torch.int32).reshape(4000, 1000)
    succeed(save_on([{"x": p} for p in sharded(whole, 3)], path))
    wanted = sharded(whole, 4, fill=False)
    storages = [CountingStorage() for _ in wanted]
    succeed(load_on([{"x": p} for p in wanted], path, storages=storages))
    for piece, storage in zip(wanted, storages, strict=True):
        assert_filled(piece, whole)
        # A part may begin and end within a block, once per chunk that it lies in.
        assert storage.bytes <= 4_000_000 + 4 * checksums.BLOCK_BYTES + 4096


def test_many_small_boxes_read_their_blocks_once(path):
    whole = torch.arange(600_000, dtype=torch.int32).reshape(600, 1000)
    succeed(save_on([{"x": whole}], path))
    rows = [((row, 0), (1, 1000)) for row in range(0, 600, 2)]
    every_second_row = piece_of(whole, rows, fill=False)
    storage = CountingStorage()
    succeed(load_on([{"x": every_second_row}], path, storages=[storage]))
    assert_filled(every_second_row, whole)
    assert storage.bytes <= 2_400_000 + 4096


def test_replicas_are_saved_once_and_shared_out_by_bytes(path):
    ranks = 4
    state = {f"w{i}": torch.full((1000 + 37 * i,), float(i)) for i in range(40)}
    succeed(save_on([dict(state) for _ in range(ranks)], path))
    written = files_of(path)
    data = {name: record["bytes"] - record["header_bytes"] for name, record in written.items()}
    assert sum(data.values()) == sum(t.numel() * 4 for t in state.values())
    assert len(data) == ranks
    assert max(data.values()) - min(data.values()) <= max(t.numel() * 4 for t in state.values())


def test_one_large_replica_is_shared_out_too(path, monkeypatch):
    monkeypatch.setattr("vescale_ckpt._save.plan.SHARED_SLAB_BYTES", 4096)
    whole = torch.arange(40_000.0).reshape(100, 400)
    succeed(save_on([{"w": whole} for _ in range(3)], path))
    sizes = [record["bytes"] - record["header_bytes"] for record in files_of(path).values()]
    assert sum(sizes) == 160_000
    assert max(sizes) - min(sizes) <= 4096
    assert read(path)["w"].equal(whole)


def test_what_one_rank_alone_holds_counts_as_its_load(path):
    big, small = torch.zeros(10_000), [torch.zeros(1000) for _ in range(9)]
    only_first = piece_of(big, [((0,), (10_000,))])
    nothing = piece_of(big, [])
    shared = {f"s{i}": t for i, t in enumerate(small)}
    succeed(save_on([{"big": only_first, **shared}, {"big": nothing, **shared}], path))
    sizes = {n: r["bytes"] - r["header_bytes"] for n, r in files_of(path).items()}
    assert sizes == {"r00000.safetensors": 40_000, "r00001.safetensors": 36_000}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_boxes_without_elements_hold_nothing(path, place):
    whole = torch.arange(24.0).reshape(6, 4)
    held = [[((0, 0), (2, 4)), ((2, 0), (1, 4))], [((3, 0), (3, 4))], []]
    empty = [((6, 0), (0, 4)), ((1, 1), (0, 0)), ((0, 0), (0, 4))]

    def pieces(fill):
        boxes = [[*own[:place], empty[i], *own[place:]] for i, own in enumerate(held)]
        return [piece_of(whole, own, gap=1, fill=fill) for own in boxes]

    nothing = piece_of(torch.empty(0, 4), [((0, 0), (0, 4))])
    succeed(save_on([{"w": piece, "none": nothing} for piece in pieces(True)], path))
    assert read(path)["w"].equal(whole)
    assert read(path)["none"].shape == (0, 4)
    into = pieces(False)
    succeed(load_on([{"w": piece, "none": nothing} for piece in into], path))
    for piece in into:
        assert_filled(piece, whole)


def files_of(path):
    with open(f"{path}/COMMIT", "rb") as file:
        generation = json.load(file)["generation"]
    with open(f"{path}/{generation}/manifest.json", "rb") as file:
        return json.load(file)["files"]
