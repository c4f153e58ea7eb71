"""What a run says that its ranks hold is what the level of ZeRO leaves them."""

from typing import Any

import pytest
import torch
from vescale_comm import simulate
from vescale_parallel import mesh as make_mesh
from vescale_parallel.train.data import load_corpus
from vescale_parallel.train.memory import KINDS, held_bytes
from vescale_parallel.train.options import Options
from vescale_parallel.train.run import build, train_step

RANKS = 4


def held(zero: int) -> list[dict[str, int]]:
    options = Options(
        data=(__file__,), layers=2, dim=32, hidden=48, context=16, steps=2, batch=4, zero=zero
    )
    corpus = load_corpus(options.data, options.context)

    def rank(rank: int, world_size: int) -> Any:
        run = build(options, corpus, make_mesh(device_type="cpu", dp=RANKS))
        train_step(run)
        return held_bytes(run)

    every = simulate(RANKS).run(rank)
    assert all(one == every[0] for one in every)
    found: list[dict[str, int]] = every[0]
    return found


@pytest.mark.parametrize(("zero", "sharded"), [(1, 1), (2, 2), (3, 3)])
def test_each_level_shards_one_kind_more(zero: int, sharded: int):
    torch.manual_seed(0)
    whole, found = held(0)[0], held(zero)
    assert len(found) == RANKS
    for number, kind in enumerate(reversed(KINDS)):
        for rank in found:
            share = rank[kind] / whole[kind]
            # Padding, and counts of steps, are a few bytes.
            expected = 1 / RANKS if number < sharded else 1.0
            # The gradients of level 1 are packed in whole buffers, which are not gradients.
            if (zero, kind) != (1, "gradients"):
                assert share == pytest.approx(expected, rel=0.05), (kind, rank)
