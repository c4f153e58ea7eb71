"""Property: fingerprints are equal exactly where the numbers that follow are."""

import torch
from vescale_rng._cpu.mt19937_jump import WORDS
from vescale_rng.streams import at, fingerprint, position


def test_places_and_seeds_differ():
    found = {}
    for seed in (*range(40), 2**32, 2**63, 2**64 - 1):
        generator = torch.Generator().manual_seed(seed)
        for words in (0, 1, WORDS - 1, 1, 5 * WORDS):
            torch.empty(words, dtype=torch.uint8).random_(generator=generator)
            if words or not found.get((seed, 0)):
                found.setdefault(fingerprint(generator), []).append((seed, words))
    assert all(len(places) == 1 for places in found.values())
    assert all(0 <= number < 2**63 for number in found)


def test_equal_states_have_one_fingerprint():
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    torch.empty(3 * WORDS).uniform_(generator=one)
    for _ in range(3):
        torch.empty(WORDS).uniform_(generator=other)
    assert fingerprint(one) == fingerprint(other)
    before = fingerprint()
    with at(position()):
        torch.rand(5)
    assert fingerprint() == before


def test_a_cached_normal_counts_only_while_it_waits():
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    torch.empty(1).normal_(generator=one)
    torch.empty(2).normal_(generator=other)
    assert fingerprint(one) != fingerprint(other)
    torch.empty(1).normal_(generator=one)
    # The bits of the used one lie in the state still.
    assert fingerprint(one) == fingerprint(other)


def test_of_a_cuda_generator(monkeypatch):
    """The seed and the offset are all: nothing is read from the device."""

    class Generator:
        device = torch.device("cuda", 0)

        def __init__(self, seed, offset):
            self.place = seed, offset

        def initial_seed(self):
            return self.place[0]

        def get_offset(self):
            return self.place[1]

    found = {fingerprint(Generator(seed, offset)) for seed in (0, 1, -1) for offset in (0, 4, 8)}
    assert len(found) == 9
    assert fingerprint(Generator(1, 4)) in found
