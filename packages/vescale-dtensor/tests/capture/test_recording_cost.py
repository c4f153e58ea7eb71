"""What recordings and calls cost grows with what they hold alone, and replays cost less than calls.

Times depend on the machine, so Python calls are counted.
"""

import sys
import warnings

import torch
import vescale_dtensor as vd
from capture_guards import line, rows, spread
from torch import nn
from vescale_comm.testing import on_ranks
from vescale_dtensor import Shard

DEPTHS = 3, 6, 18


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.up.weight = nn.Parameter(spread(self.up.weight.detach(), Shard(0)))

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def step_of(depth):
    torch.manual_seed(0)
    model = vd.distribute_module(nn.Sequential(*(Block() for _ in range(depth))), line())

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return step


def calls(function, *arguments):
    """How many Python functions a call runs."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += 1

    before = sys.gettrace()
    sys.settrace(note)
    try:
        function(*arguments)
    finally:
        sys.settrace(before)
    return count


def costs(depth):
    """Python calls of an eager step, of its recording and of a replay."""
    step, x = step_of(depth), spread(rows())
    step(x), step(x)
    found = []
    for _ in range(3):  # of which one at most is in a step whose lineage is compared
        captured = vd.capture(step, check=None)
        found.append((calls(step, x), calls(captured, x), calls(captured, x)))
        assert captured._misses.recordings == captured._misses.replays == 1
        assert len(captured.programs) == 1
    eager, recorded, replayed = map(min, zip(*found, strict=True))
    return eager, recorded, replayed


@on_ranks(2)
def test_what_is_not_recorded_costs_little():
    """A call that is not recorded costs as much after many kinds as after two."""
    step, lengths = (lambda x: x.square().sum()), range(2, 102, 2)
    captured, given = vd.capture(step, check=None), [spread(rows(count)) for count in lengths]
    for x in given:
        step(x), step(x)
    extra = []
    warnings.simplefilter("ignore")  # of lengths that change again and again
    for known in (2, 32):
        # What pays for as many recordings, and then nothing does.
        captured._misses.replays, captured._misses._spent = 72 * (known - 2), 0
        while len(captured.programs) < known:
            for x in given[:known]:
                captured(x)
        captured._misses._spent = 10**6
        assert len(captured.programs) == known
        captured(given[-1])
        extra.append(calls(captured, given[-1]) - calls(step, given[-1]))
        assert len(captured.programs) == known
    assert extra[0] == extra[1], extra


@on_ranks(2)
def test_recording_is_linear_in_the_ops():
    for _ in range(2):  # what is worked out once for each function, and the steps that are compared
        costs(1)
    found = [costs(depth) for depth in DEPTHS]
    for eager, _, replayed in found:
        assert replayed <= eager, found
    (_, few, _), (_, some, _), (_, many, _) = found
    each = (some - few) / (DEPTHS[1] - DEPTHS[0])
    assert (many - some) / (DEPTHS[2] - DEPTHS[1]) <= 1.02 * each, found
