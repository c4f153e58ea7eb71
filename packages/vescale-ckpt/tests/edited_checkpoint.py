"""Rewrite a saved checkpoint the way an attacker would: with a digest that fits again."""

import hashlib
import json
from pathlib import Path

from vescale_ckpt._format.manifest import CommitRecord


def generation_of(path):
    """The directory of the generation that counts."""
    return Path(path) / json.loads((Path(path) / "COMMIT").read_bytes())["generation"]


def manifest_of(path):
    """The manifest as JSON."""
    return json.loads((generation_of(path) / "manifest.json").read_bytes())


def damage(path, at=-1, *, file="r00000.safetensors", byte=b"\x01"):
    """Put another byte into a data file, at a place that is counted from its end."""
    with open(generation_of(path) / file, "r+b") as opened:
        opened.seek(at, 2)
        opened.write(byte)


def rewrite_manifest(path, content):
    """Put `content` (bytes, or JSON) in place of the manifest and commit it."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    directory = generation_of(path)
    (directory / "manifest.json").write_bytes(data)
    record = CommitRecord(directory.name, len(data), hashlib.sha256(data).hexdigest())
    (Path(path) / "COMMIT").write_bytes(record.to_bytes())
