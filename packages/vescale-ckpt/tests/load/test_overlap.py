"""No element of `into` is filled twice: of two names for one memory, load refuses or agrees."""

import math
import random

import numpy as np
import pytest
import torch
from emulated_ranks import Piece, PieceBox, PieceLayout, load_on, save_on, sharded, succeed
from vescale_ckpt import MismatchError, compare, load, save
from vescale_ckpt._load.overlap import _pairs, overlaps_itself
from vescale_ckpt._tensors.boxes import Box, TensorBoxes

W = torch.arange(12.0).reshape(3, 4)


def saved(path, **state):
    save(path, state)
    return path


def refused(path, into, words):
    before = [t.clone() for t in into.values() if isinstance(t, torch.Tensor)]
    with pytest.raises(MismatchError, match=words):
        load(path, into)
    after = [t for t in into.values() if isinstance(t, torch.Tensor)]
    assert all(map(torch.equal, before, after))


def test_one_tensor_under_two_names_with_two_values(path):
    w = torch.zeros(3, 4)
    refused(saved(path, a=W, b=W + 1), {"a": w, "b": w}, "'a' and 'b': .* one tensor")


def test_tied_weights_that_were_saved_alike(path):
    saved(path, a=W, b=W.clone(), c=W[:2].clone())
    w = torch.zeros(3, 4)
    loaded = load(path, {"a": w, "b": w, "c": torch.zeros(2, 4)})
    assert w.equal(W)
    assert loaded["a"] is w
    assert loaded["b"] is w


def test_tied_weights_whose_chunks_were_divided_otherwise(path):
    succeed(save_on([{"a": a, "b": W} for a in sharded(W, 2)], path))
    w = torch.zeros(3, 4)
    load(path, {"a": w, "b": w})
    assert w.equal(W)


def test_two_values_whose_chunks_were_divided_otherwise(path):
    succeed(save_on([{"a": a, "b": W + (W == 11)} for a in sharded(W, 2)], path))
    w = torch.zeros(3, 4)
    refused(path, {"a": w, "b": w}, "'a' and 'b': .* two that differ")
    assert compare(path, {"a": w, "b": w}).different[0].startswith("'a' and 'b'")
    # Each rank compares what it needs, and one that finds a difference is enough.
    for error in load_on([{"a": p, "b": p} for p in sharded(W, 2, fill=False)], path):
        assert isinstance(error, MismatchError)


OVERLAPPING = [
    lambda w: (w, w[:2]),
    lambda w: (w, w.t()),
    lambda w: (w[:, 1:3], w[:, 2:]),
    lambda w: (w, w.view(torch.int32)),
    lambda w: (w[0], torch.from_numpy(w.numpy())[0, 1:]),
    lambda w: (w, torch.nn.Parameter(w)[1:]),
]


@pytest.mark.parametrize("views", OVERLAPPING)
def test_views_that_overlap(path, views):
    a, b = views(torch.zeros(3, 4))
    saved(path, a=torch.ones(a.shape), b=torch.ones(b.shape).to(b.dtype))
    refused(path, {"a": a, "b": b}, "'a' and 'b': in `into` they overlap in memory")


APART = [
    lambda w: (w[:2], w[2:]),
    lambda w: (w[:, ::2], w[:, 1::2]),
    lambda w: (w[:, 0], w[:, 1:]),
    lambda w: (w[:0], w),
]


@pytest.mark.parametrize("views", APART)
def test_views_that_do_not(path, views):
    a, b = views(torch.zeros(3, 4))
    saved(path, a=torch.ones(a.shape), b=torch.full(b.shape, 2.0))
    load(path, {"a": a, "b": b})
    assert bool((a == 1).all())
    assert bool((b == 2).all())


def test_a_module_and_its_own_parameter(path):
    module = torch.nn.Linear(2, 2)
    saved(path, model=module.state_dict(), w=torch.ones(2, 2))
    refused(path, {"model": module.state_dict(), "w": module.weight}, "'model/weight' and 'w'")


def test_sliding_windows(path):
    w = torch.zeros(6)
    saved(path, w=torch.arange(8.0).reshape(4, 2))
    refused(path, {"w": w.as_strided((4, 2), (1, 1))}, "elements of `into` share memory")


def test_two_shards_that_are_one_memory_refuse_on_all_ranks(path):
    succeed(save_on([{"a": W, "b": W + 1}], path))
    intos = [{"a": p, "b": p} for p in sharded(W, 2, fill=False)]
    intos[1]["b"] = sharded(W, 2, fill=False)[1]
    for error in load_on(intos, path):
        assert isinstance(error, MismatchError)
        assert "one tensor" in str(error)


def test_boxes_of_one_tensor_that_overlap(path):
    saved(path, w=torch.arange(8.0))
    boxes = (PieceBox((0,), (4,), 0, (1,)), PieceBox((4,), (4,), 3, (1,)))
    piece = Piece(torch.zeros(8), PieceLayout((8,), boxes))
    with pytest.raises(MismatchError, match="two boxes of `into` are the same memory"):
        load(path, {"w": piece})


@pytest.mark.parametrize("seed", range(4))
def test_as_counted_element_by_element(seed):
    rng, memory = random.Random(seed), torch.zeros(400)
    for _ in range(60):
        targets, elements = [], []
        for name in "abc":
            shape = tuple(rng.randint(0, 3) for _ in range(rng.randint(0, 3)))
            strides = tuple(rng.randint(0, 9) for _ in shape)
            box = Box((0,) * len(shape), shape, rng.randint(0, 20), strides)
            places = [
                box.local_offset + sum(map(math.prod, zip(index, strides, strict=True)))
                for index in np.ndindex(*shape)
            ]
            assert overlaps_itself(box) == (len(set(places)) < len(places))
            if len(set(places)) == len(places):
                targets.append((name, memory, TensorBoxes(shape, (box,))))
                elements.append(set(places))
        count = range(len(targets))
        expected = {(i, j) for i in count for j in count if i < j and elements[i] & elements[j]}
        assert _pairs(targets) == expected
