"""The state that the golden checkpoints hold, and how one is made when the format changes.

python tests/golden_state.py tests/golden/v2 crc32
python tests/golden_state.py tests/golden/v2-xxh3 xxh3_64
"""

import math
import sys

import torch
from emulated_ranks import save_on, sharded, succeed
from vescale_ckpt import RankLocal
from vescale_ckpt._format import checksums

WHOLE = torch.arange(15.0).reshape(5, 3) / 8
VALUES = {
    "list": [1, -2.5, True, None, "text"],
    "tuple": (math.inf, -math.inf, (2**70,)),
    1: {"1": "string key beside an integer key", 1: ()},
}
PLAIN = {
    "scalar": torch.tensor(7),
    "bfloat16": torch.arange(4).to(torch.bfloat16),
    "complex": torch.tensor([1 + 2j, -3j]),
    "bool": torch.tensor([[True, False]]),
    "empty": torch.empty(0, 2),
}


def make(path):
    """Save the state from two emulated ranks."""
    states = [
        {"sharded": piece, "plain": PLAIN, "values": VALUES, "own": RankLocal({"rank": rank})}
        for rank, piece in enumerate(sharded(WHOLE, 2))
    ]
    succeed(save_on(states, path))


if __name__ == "__main__":
    if sys.argv[2] == "crc32":
        checksums.fastest = lambda: checksums.CRC32
    make(sys.argv[1])
