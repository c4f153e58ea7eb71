"""Property: a state saved on 8 ranks goes on on 3, on one device, and in the same numbers."""

import json

import pytest
import torch
import torch.distributed as dist
from rng_pieces import Shard
from vescale_comm.testing import run
from vescale_rng import (
    Normal,
    StateError,
    Uniform,
    dropout,
    fill_,
    get_state,
    layout_of,
    set_state,
    use,
    whole,
)
from vescale_rng._state.agreement import message_device

SHAPE = (13, 7)


def draw(layout):
    """Three ops, of which the small normal leaves a sample cached under the native policy."""
    made = [torch.empty(layout.local_shape) for _ in "12"]
    fill_(made[0], Normal(), layout)
    fill_(made[1], Uniform(), layout)
    fill_(torch.empty(3), Normal(), whole((3,)))
    return [*made, dropout(torch.ones(layout.local_shape), 0.5, layout)]


def layout_at(rank, world_size, dim):
    return layout_of(SHAPE, [Shard(dim)], (world_size,), (rank,))


def begin(rank, world_size, name):
    with use(name):
        torch.manual_seed(11)
        draw(layout_at(rank, world_size, 0))
        return json.dumps(get_state())


def go_on(rank, world_size, name, text):
    with use(name):
        torch.manual_seed(rank)
        set_state(json.loads(text))
        return draw(layout_at(rank, world_size, 1)), json.dumps(get_state())


@pytest.mark.parametrize("name", ["native", "portable"])
def test_eight_ranks_save_and_three_go_on(name):
    texts = set(run(begin, 8, name))
    assert len(texts) == 1
    text = texts.pop()
    assert len(text) < 4096
    with use(name), torch.random.fork_rng([]):
        torch.manual_seed(11)
        draw(whole(SHAPE))
        assert json.loads(json.dumps(get_state())) == json.loads(text)
        expected = draw(whole(SHAPE))
        after = json.dumps(get_state())
    found = run(go_on, 3, name, text)
    assert {state for _, state in found} == {after}
    for index, whole_tensor in enumerate(expected):
        assert torch.equal(torch.cat([made[index] for made, _ in found], 1), whole_tensor)


def test_a_state_says_what_decides_the_numbers():
    state = get_state(torch.Generator().manual_seed(5))
    assert state["policy"] == "native"
    assert state["cpu"]["seed"] == 5
    assert state["cpu"]["index"] == 0
    assert state["cpu"]["threads"] is None


CUDA = {"engine": "philox4x32-10", "seed": 3, "offset": 8, "threads": 270336}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": "mt19937"}, "philox4x32-10"),
        ({"seed": -1}, "seed -1"),
        ({"offset": 6}, "offset 6"),
        ({"offset": None}, "offset None"),
        ({"threads": 0}, "threads 0"),
        ({"threads": 1000}, "no multiple of 256"),
        ({"threads": None}, "threads None"),
    ],
)
def test_a_damaged_cuda_part_is_refused_and_changes_nothing(changes, words):
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    state = get_state(torch.Generator().manual_seed(2)) | {"cuda": CUDA | changes}
    with pytest.raises(StateError, match=words):
        set_state(state, generator)
    assert torch.equal(generator.get_state(), before)


def test_a_cuda_part_does_not_hinder_a_machine_without():
    generator = torch.Generator()
    saved = torch.Generator().manual_seed(2)
    set_state(get_state(saved) | {"cuda": CUDA}, generator)
    assert torch.equal(generator.get_state(), saved.get_state())


def test_a_state_without_the_part_is_refused():
    state = get_state(torch.Generator().manual_seed(2))
    del state["cpu"]
    with pytest.raises(StateError, match="no part 'cpu'"):
        set_state(state, torch.Generator())


@pytest.mark.parametrize(
    ("config", "expected"),
    [("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda")],
)
def test_ranks_tell_each_other_from_the_host_where_they_can(monkeypatch, config, expected):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert message_device() == expected
