"""What a checkpoint holds, as JSON for programs and as lines for people."""

import math
from typing import Any

from vescale_ckpt._dtypes import STORED_AS
from vescale_ckpt._errors import CheckpointError
from vescale_ckpt._names import child
from vescale_ckpt._open import Checkpoint, is_committed, open_checkpoint
from vescale_ckpt._rebuild import holds_tensor, rebuild
from vescale_ckpt._storage import Storage
from vescale_ckpt._values import Node

_VALUE_WIDTH = 60


def describe(storage: Storage, path: str) -> dict[str, Any]:
    """The tensors and values of one checkpoint. Reads no tensor data."""
    checkpoint = open_checkpoint(storage, path)
    manifest = checkpoint.manifest
    tensors = {
        name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "chunks": len(tensor.chunks),
            "bytes": math.prod(tensor.shape) * STORED_AS[tensor.dtype].bytes_per_element,
        }
        for name, tensor in manifest.tensors.items()
    }
    return {
        "path": path,
        "tensors": tensors,
        "values": values_of(manifest.state),
        "bytes": _nbytes(checkpoint),
        "files": len(manifest.files),
        "provenance": manifest.provenance,
    }


def describe_root(storage: Storage, root: str) -> dict[str, Any]:
    """The checkpoints in a directory. One that cannot be opened is listed with the reason."""
    found: list[dict[str, Any]] = []
    for name in storage.names_in(root):
        path = f"{root}/{name}"
        if name.startswith(".") or not is_committed(storage, path):
            continue
        try:
            checkpoint = open_checkpoint(storage, path)
        except CheckpointError as error:
            found.append({"name": name, "error": f"{type(error).__name__}: {error}"})
            continue
        found.append(
            {
                "name": name,
                "created": str(checkpoint.manifest.provenance.get("created", "?")),
                "tensors": len(checkpoint.manifest.tensors),
                "bytes": _nbytes(checkpoint),
            }
        )
    return {"path": root, "checkpoints": found}


def lines_of(found: dict[str, Any]) -> list[str]:
    """The text that `ls` prints for one checkpoint."""
    origin = found["provenance"]
    lines = [
        f"{found['path']}: {len(found['tensors'])} tensors, {found['bytes']:,} bytes in "
        f"{found['files']} files, saved {origin.get('created')} by {origin.get('world_size')} "
        "rank(s)"
    ]
    width = max(map(len, [*found["tensors"], *found["values"]]), default=0)
    for name, tensor in found["tensors"].items():
        shape = ", ".join(map(str, tensor["shape"]))
        chunks = f"  in {tensor['chunks']} chunks" if tensor["chunks"] > 1 else ""
        lines.append(f"  {name:{width}}  {tensor['dtype']}[{shape}]{chunks}")
    for name, value in found["values"].items():
        lines.append(f"  {name:{width}}  {_shortened(value)}")
    return lines


def lines_of_root(found: dict[str, Any]) -> list[str]:
    """The text that `ls` prints for a directory of checkpoints."""
    width = max(len(entry["name"]) for entry in found["checkpoints"])
    return [
        f"{entry['name']:{width}}  {entry['error']}"
        if "error" in entry
        else f"{entry['name']:{width}}  {entry['created']}  {entry['tensors']:5d} tensors  "
        f"{entry['bytes']:,} bytes"
        for entry in found["checkpoints"]
    ]


def values_of(state: Node) -> dict[str, str]:
    """The text of every plain value, by name."""
    return dict(_values(state, "", top=True))


def _nbytes(checkpoint: Checkpoint) -> int:
    return sum(record.nbytes for record in checkpoint.manifest.files.values())


def _values(node: Node, name: str, *, top: bool = False) -> list[tuple[str, str]]:
    """Name and text of every plain value; a subtree without tensors and dicts is one value."""
    if isinstance(node, dict) and "dict" in node:
        return [
            value
            for key, entry in node["dict"]
            for value in _values(entry, child(name, key, top=top))
        ]
    if isinstance(node, dict) and "tensor" in node:
        return []
    if not holds_tensor(node):
        return [(name, repr(rebuild(node, {})))]
    kind, items = ("list", node) if isinstance(node, list) else next(iter(node.items()))
    step = "~r" if kind == "rank_local" else ""
    return [v for i, entry in enumerate(items) for v in _values(entry, f"{name}/{step}{i}")]


def _shortened(text: str) -> str:
    return text if len(text) <= _VALUE_WIDTH else f"{text[: _VALUE_WIDTH - 3]}..."
