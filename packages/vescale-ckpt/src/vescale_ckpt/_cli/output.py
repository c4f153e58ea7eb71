"""Output of the command line: JSON for programs, and lines for people."""

from typing import Any

from vescale_ckpt._errors import CheckpointError
from vescale_ckpt._inspect.inspect import Inspected, Statistics
from vescale_ckpt._load.open import open_checkpoint
from vescale_ckpt._storage.base import Storage
from vescale_ckpt._storage.commit_lookup import has_commit

_VALUE_WIDTH = 60


def json_of(found: Inspected) -> dict[str, Any]:
    """Return what `ls --json` prints of a checkpoint; values as text, as JSON cannot hold all."""
    tensors = {
        name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "chunks": len(tensor.chunks),
            "bytes": tensor.nbytes,
        }
        for name, tensor in found.tensors.items()
    }
    return {
        "path": found.path,
        "tensors": tensors,
        "values": {name: repr(value) for name, value in found.values.items()},
        "bytes": found.nbytes,
        "files": len(found.files),
        "provenance": found.provenance,
    }


def json_of_statistics(found: Inspected) -> dict[str, Any]:
    """Return what `show --json` prints."""
    tensors = {
        name: {"dtype": tensor.dtype, "shape": list(tensor.shape), **_texts(tensor.statistics)}
        for name, tensor in found.tensors.items()
    }
    values = {name: repr(value) for name, value in found.values.items()}
    return {"path": found.path, "tensors": tensors, "values": values}


def _texts(statistics: Statistics | None) -> dict[str, Any]:
    if statistics is None:
        return {}
    texts: dict[str, Any] = {"first": [_text(element) for element in statistics.first]}
    if statistics.mean is not None:
        texts |= {
            "min": _text(statistics.least),
            "max": _text(statistics.largest),
            "mean": _text(statistics.mean),
            "not_finite": statistics.not_finite,
        }
    return texts


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def json_of_root(storage: Storage, root: str) -> dict[str, Any]:
    """List the checkpoints in a directory; one that cannot be opened, with the reason."""
    found: list[dict[str, Any]] = []
    for name in storage.names_in(root):
        path = f"{root}/{name}"
        if name.startswith(".") or not has_commit(storage, path):
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
                "bytes": sum(f.nbytes for f in checkpoint.manifest.files.values()),
            }
        )
    return {"path": root, "checkpoints": found}


def lines_of(found: dict[str, Any]) -> list[str]:
    """Return the text that `ls` prints for one checkpoint."""
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
    """Return the text that `ls` prints for a directory of checkpoints."""
    width = max(len(entry["name"]) for entry in found["checkpoints"])
    return [
        f"{entry['name']:{width}}  {entry['error']}"
        if "error" in entry
        else f"{entry['name']:{width}}  {entry['created']}  {entry['tensors']:5d} tensors  "
        f"{entry['bytes']:,} bytes"
        for entry in found["checkpoints"]
    ]


def lines_of_tensors(found: dict[str, Any]) -> list[str]:
    """Return the text that `show` prints."""
    lines = []
    for name, one in found["tensors"].items():
        lines.append(f"{name}  {one['dtype']}[{', '.join(map(str, one['shape']))}]")
        if "min" in one:
            bad = f"  {one['not_finite']} not finite" if one["not_finite"] else ""
            lines.append(f"  min {one['min']}  mean {one['mean']}  max {one['max']}{bad}")
        if one["first"]:
            more = ", ..." if len(one["first"]) == 4 else ""
            lines.append(f"  {', '.join(one['first'])}{more}")
    lines += [f"{name}  {text}" for name, text in found["values"].items()]
    return lines


def lines_of_difference(found: dict[str, Any]) -> list[str]:
    """Return the text that `diff` prints."""
    width = max((len(entry["name"]) for entry in found["different"]), default=0)
    lines = [f"{entry['name']:{width}}  {entry['what']}" for entry in found["different"]]
    summary = f"{found['same_tensors']} tensors are the same bit for bit"
    return [*lines, f"{summary}; {len(lines)} tensors or values differ"]


def _shortened(text: str) -> str:
    return text if len(text) <= _VALUE_WIDTH else f"{text[: _VALUE_WIDTH - 3]}..."
