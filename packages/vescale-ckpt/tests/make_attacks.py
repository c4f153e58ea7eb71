"""Writes the hostile checkpoints in tests/attacks/, each a legal one that somebody has edited.

python tests/make_attacks.py
"""

import json
import re
import shutil
import sys
from pathlib import Path

import torch
from edited_checkpoint import manifest_of, rewrite_manifest
from vescale_ckpt import save
from vescale_ckpt._format import checksums

sys.path.insert(0, str(Path(__file__).parent / "format"))
from test_hostile import EDITS, RAW, set_in

ATTACKS = Path(__file__).parent / "attacks"
# Files that a repository should hold are small.
_MOST_BYTES = 50_000


def main():
    """Write every attack, and beside them what must be said about each."""
    checksums.fastest = lambda: checksums.CRC32
    shutil.rmtree(ATTACKS, ignore_errors=True)
    expected = {}
    for name, (where, value, words) in EDITS.items():
        path = saved(name)
        manifest = manifest_of(path)
        set_in(manifest, where, value)
        rewrite_manifest(path, manifest)
        expected[path.name] = words
    for name, (content, words) in RAW.items():
        if 0 < len(content) < _MOST_BYTES:
            path = saved(f"manifest is {name}")
            rewrite_manifest(path, content)
            expected[path.name] = words
    text = json.dumps(expected, indent=1, sort_keys=True)
    (ATTACKS / "expected.json").write_text(text + "\n")


def saved(name):
    path = ATTACKS / re.sub(r"\W+", "-", name)
    save(path, {"w": torch.zeros(3, 4), "n": 1})
    return path


if __name__ == "__main__":
    main()
