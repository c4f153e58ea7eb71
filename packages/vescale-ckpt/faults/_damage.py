"""Faults that befall a checkpoint after it was saved: damage, and malice."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _trials import CAUGHT, SILENT, Bench, Trial, after_damage, files_in

# Of every file, this many bits are flipped, evenly spread; small files get every byte.
_FLIPS = 48


def truncated(bench: Bench) -> Iterator[Trial]:
    """Every file cut to nothing, to half, and by one byte."""
    healthy = bench.saved(1)
    for file in files_in(healthy):
        inside, size = os.path.relpath(file, healthy), os.path.getsize(file)
        for length in sorted({0, size // 2, size - 1}):
            path = bench.copied(healthy)
            os.truncate(os.path.join(path, inside), length)
            yield Trial(f"{inside} to {length}", *after_damage(bench.load(path), 1))


def flipped(bench: Bench) -> Iterator[Trial]:
    """One bit of one byte, all over every file."""
    healthy = bench.saved(1)
    for file in files_in(healthy):
        inside, size = os.path.relpath(file, healthy), os.path.getsize(file)
        for at in sorted({size * i // _FLIPS for i in range(_FLIPS)} - {size}):
            path = bench.copied(healthy)
            with open(os.path.join(path, inside), "r+b") as handle:
                handle.seek(at)
                byte = handle.read(1)[0]
                handle.seek(at)
                handle.write(bytes([byte ^ (1 << (at % 8))]))
            yield Trial(f"{inside} byte {at}", *after_damage(bench.load(path), 1))


def removed(bench: Bench) -> Iterator[Trial]:
    """Every file, gone."""
    healthy = bench.saved(1)
    for file in files_in(healthy):
        inside = os.path.relpath(file, healthy)
        path = bench.copied(healthy)
        os.remove(os.path.join(path, inside))
        yield Trial(inside, *after_damage(bench.load(path), 1))


def code(bench: Bench) -> Iterator[Trial]:
    """Every file is given a beginning that runs a command if it is unpickled."""
    healthy = bench.saved(1)
    for file in files_in(healthy):
        inside = os.path.relpath(file, healthy)
        for how in ("in place of the beginning", "in place of the file"):
            path = bench.copied(healthy)
            proof = f"{bench.folder}/executed-{bench.made}"
            bomb = f"cos\nsystem\n(S'touch {proof}'\ntR.".encode()
            target = Path(path, inside)
            rest = target.read_bytes()[len(bomb) :] if "beginning" in how else b""
            target.write_bytes(bomb + rest)
            ended = bench.load(path)
            if os.path.exists(proof):
                yield Trial(f"{inside}, {how}", SILENT, "loading ran the command")
            else:
                yield Trial(f"{inside}, {how}", *after_damage(ended, 1))


def hostile(bench: Bench) -> Iterator[Trial]:
    """The metadata is rewritten, with digests that fit, to point outside and to claim terabytes."""
    edits = _EDITS.get(type(bench.system).__name__, {})
    for name, edit in edits.items():
        path = bench.saved(1)
        # The other checkpoint belongs to somebody else; this one must not be able to show it.
        secret = bench.saved(2)
        edit(path, secret)
        ended = bench.load(path)
        if ended.how == "returned" and ended.value != 1:
            yield Trial(name, SILENT, "shows the content of a file outside the checkpoint")
        elif ended.how in ("killed", "hung"):
            yield Trial(name, SILENT, f"the process was {ended.how}")
        else:
            yield Trial(name, CAUGHT, ended.raised)


def _ours(change: Callable[[dict[str, Any], str], None]) -> Callable[[str, str], None]:
    """Edit the manifest and make the commit record fit, as an attacker would."""

    def edit(path: str, secret: str) -> None:
        commit = Path(path, "COMMIT")
        record = json.loads(commit.read_bytes())
        manifest = Path(path, record["generation"], "manifest.json")
        content = json.loads(manifest.read_bytes())
        generation = json.loads(Path(secret, "COMMIT").read_bytes())["generation"]
        change(content, f"{os.path.relpath(secret, manifest.parent)}/{generation}")
        data = json.dumps(content).encode()
        manifest.write_bytes(data)
        record["manifest_bytes"] = len(data)
        record["manifest_sha256"] = hashlib.sha256(data).hexdigest()
        commit.write_text(json.dumps(record, separators=(",", ":")))

    return edit


def _ours_outside(manifest: dict[str, Any], secret: str) -> None:
    name = f"{secret}/r00000.safetensors"
    manifest["files"][name] = manifest["files"].pop("r00000.safetensors")
    for tensor in manifest["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk["file"] = name


def _ours_terabytes(manifest: dict[str, Any], secret: str) -> None:
    manifest["tensors"]["w"]["shape"] = [1 << 42]
    manifest["tensors"]["w"]["chunks"][0] |= {"shape": [1 << 42], "bytes": 1 << 44}


def _ours_deep(manifest: dict[str, Any], secret: str) -> None:
    for _ in range(500):
        manifest["state"] = [manifest["state"]]


def _dcp(change: Callable[[Any, str], None]) -> Callable[[str, str], None]:
    def edit(path: str, secret: str) -> None:
        from torch.distributed import checkpoint as dcp

        metadata = dcp.FileSystemReader(path).read_metadata()
        change(metadata, os.path.relpath(secret, path))
        _write_dcp_metadata(path, metadata)

    return edit


def _write_dcp_metadata(path: str, metadata: Any) -> None:
    from torch.distributed import checkpoint as dcp

    # The writer of the system itself: what it makes of a Metadata is a legal file.
    writer = dcp.FileSystemWriter(path)
    results = [
        [
            dcp.filesystem.WriteResult(index=i, size_in_bytes=0, storage_data=info)
            for i, info in metadata.storage_data.items()
        ]
    ]
    writer.finish(metadata, results)


def _dcp_outside(metadata: Any, secret: str) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = f"{secret}/{info.relative_path}"


def _dcp_terabytes(metadata: Any, secret: str) -> None:
    for info in metadata.storage_data.values():
        info.length = 1 << 44


_EDITS: dict[str, dict[str, Callable[[str, str], None]]] = {
    "Ours": {
        "a file outside": _ours(_ours_outside),
        "a tensor of 16 TiB": _ours(_ours_terabytes),
        "bottomless nesting": _ours(_ours_deep),
    },
    "Dcp": {"a file outside": _dcp(_dcp_outside), "16 TiB": _dcp(_dcp_terabytes)},
}
