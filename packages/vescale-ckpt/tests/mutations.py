"""Changes to files, from a seed, and a bound of the memory that reading them may take."""

import contextlib
import random
import re
import resource
from collections.abc import Iterator
from pathlib import Path

PIECES = (b"0", b"9" * 20, b"[", b"]", b"{", b"}", b",", b'"', b"-", b"\\u", b"null", b".5", b"e9",
          b" ", b"\0", b"\xff\xff\xff\x7f", b"\x94", b"h\x00", b"(", b")", b"R", b"b", b".", b"~",
          b"../")  # fmt: skip


def mutated(content: bytes, dice: random.Random) -> bytes:
    """Change a file in one to five places."""
    made = bytearray(content)
    for _ in range(dice.choice((1, 1, 2, 5))):
        at = dice.randrange(len(made) + 1)
        what = dice.randrange(5)
        if what == 0 and at < len(made):
            made[at] ^= 1 << dice.randrange(8)
        elif what == 1:
            del made[at : at + dice.randrange(9)]
        elif what == 2:
            made[at:at] = dice.choice(PIECES)
        elif what == 3 and made:
            start = dice.randrange(len(made))
            made[at:at] = made[start : start + dice.randrange(60)]
        else:
            made[at : at + 1] = bytes([dice.randrange(256)])
    return bytes(made)


@contextlib.contextmanager
def bounded_memory(more: int = 1 << 30) -> Iterator[None]:
    """Let this process have so much more memory than now; beyond, what asks for it fails."""
    status = Path("/proc/self/status")
    found = re.search(r"VmSize:\s+(\d+) kB", status.read_text() if status.exists() else "")
    if found is None:  # not Linux
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(found[1]) * 1024 + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
