"""Property: a saved state, through JSON text, brings back the very next numbers of any kind."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vescale_rng import PolicyError, StateError, get_state, set_state


def used(seed, words, normals):
    generator = torch.Generator().manual_seed(seed)
    torch.empty(words, dtype=torch.uint8).random_(generator=generator)
    torch.empty(normals).normal_(generator=generator)
    return generator


@given(st.integers(0, 2**64 - 1), st.integers(0, 1300), st.integers(0, 3))
def test_round_trip_through_json(seed, words, normals):
    saved = used(seed, words, normals)
    text = json.dumps(get_state(saved))
    assert len(text) < 4096
    restored = used(99, 5, 1)
    set_state(json.loads(text), restored)
    assert torch.equal(restored.get_state(), saved.get_state())
    assert restored.initial_seed() == saved.initial_seed()
    assert torch.equal(
        torch.empty(3).normal_(generator=restored), torch.empty(3).normal_(generator=saved)
    )


def test_the_default_generator_is_the_default():
    before = torch.get_rng_state()
    try:
        torch.manual_seed(5)
        torch.randn(3)
        state = get_state()
        expected = torch.randn(3)
        set_state(state)
        assert torch.equal(torch.randn(3), expected)
    finally:
        torch.set_rng_state(before)


def damaged(**changes):
    state = get_state(used(1, 2, 3))
    for name, value in changes.items():
        (state if name in state else state["cpu"])[name] = value
    return state


HOSTILE = [
    (None, StateError, "version"),
    ([], StateError, "list"),
    ({}, StateError, "version"),
    (damaged(version=2), StateError, "found 2"),
    (damaged(policy="portable"), PolicyError, "portable"),
    (damaged(cpu=None), StateError, "mt19937"),
    (damaged(engine="pcg64"), StateError, "mt19937"),
    (damaged(seed=-1), StateError, "seed -1"),
    (damaged(seed=2**64), StateError, "out of range"),
    (damaged(index=625), StateError, "index 625"),
    (damaged(index=True), StateError, "index True"),
    (damaged(index="3"), StateError, "out of range"),
    (damaged(normal="0.5"), StateError, "normal '0.5'"),
    (damaged(normal=float("inf")), StateError, "normal inf"),
    (damaged(normal=float("nan")), StateError, "normal nan"),
    (damaged(words="AAAA" * 832), StateError, "all of its words are zero"),
    (damaged(words="AAAA"), StateError, "3 bytes of words instead of 2496"),
    (damaged(words="not base64!"), StateError, "base64"),
    (damaged(words=None), StateError, "base64"),
]


@pytest.mark.parametrize(("state", "error", "words"), HOSTILE)
def test_a_damaged_state_is_refused_and_changes_nothing(state, error, words):
    generator = used(1, 2, 3)
    before = generator.get_state()
    with pytest.raises(error, match=words):
        set_state(state, generator)
    assert torch.equal(generator.get_state(), before)
