"""What differs between two checkpoints: names, shapes, values, and how far elements are apart."""

from collections.abc import Iterator
from typing import Any

import torch

from vescale_ckpt._dtypes import torch_dtype
from vescale_ckpt._fetch import fetch, uncounted
from vescale_ckpt._inspect import values_of
from vescale_ckpt._layout import local_and_layout
from vescale_ckpt._manifest import TensorRecord
from vescale_ckpt._open import Checkpoint, open_checkpoint
from vescale_ckpt._progress import Count, Progress
from vescale_ckpt._reads import plan_reads
from vescale_ckpt._select import wanted_by
from vescale_ckpt._storage import Storage


def whole_tensor(storage: Storage, checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """One tensor of a checkpoint, verified."""
    record = checkpoint.manifest.tensors[name]
    tensor = torch.empty(record.shape, dtype=torch_dtype(record.dtype))
    reads = plan_reads(checkpoint.manifest, [(name, *local_and_layout(tensor))])
    fetch(storage, checkpoint, reads, uncounted())
    return tensor


def describe_difference(
    storage: Storage, first: str, second: str, progress: Progress
) -> dict[str, Any]:
    """Every tensor and value that is not bit for bit the same; two tensors in memory at a time."""
    a, b = open_checkpoint(storage, first), open_checkpoint(storage, second)
    found: list[dict[str, Any]] = []
    names = list(dict.fromkeys([*a.manifest.tensors, *b.manifest.tensors]))
    count = Count(sum(_nbytes(a, name) + _nbytes(b, name) for name in names), progress)
    for name in names:
        found += _of_tensor(storage, a, b, name)
        count.add(_nbytes(a, name) + _nbytes(b, name))
    values_a, values_b = values_of(a.manifest.state), values_of(b.manifest.state)
    found += list(_of_values(values_a, values_b))
    same = len(names) - sum(entry["kind"] == "tensor" for entry in found)
    return {"first": first, "second": second, "same_tensors": same, "different": found}


def _nbytes(checkpoint: Checkpoint, name: str) -> int:
    record = checkpoint.manifest.tensors.get(name)
    return sum(chunk.nbytes for chunk in record.chunks) if record is not None else 0


def _of_tensor(storage: Storage, a: Checkpoint, b: Checkpoint, name: str) -> list[dict[str, Any]]:
    one, other = a.manifest.tensors.get(name), b.manifest.tensors.get(name)
    entry: dict[str, Any] = {"kind": "tensor", "name": name}
    if one is None or other is None:
        return [entry | {"what": f"only in the {'second' if one is None else 'first'}"}]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return [entry | {"what": f"{_shaped(one)} became {_shaped(other)}"}]
    x, y = (whole_tensor(storage, checkpoint, name) for checkpoint in (a, b))
    # As bits: nan is the same as itself, and 0.0 is not -0.0.
    differs = (_bits(x) != _bits(y)).view(x.numel(), -1).any(1) if x.numel() else torch.zeros(0)
    count = int(differs.sum())
    if not count:
        return []
    largest = _largest(x.reshape(-1)[differs], y.reshape(-1)[differs])
    what = f"{count} of {x.numel()} elements differ, by at most {largest:.6g}"
    return [entry | {"what": what, "elements": count, "largest": largest}]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _largest(x: torch.Tensor, y: torch.Tensor) -> float:
    if x.is_complex():
        return float((x.to(torch.complex128) - y.to(torch.complex128)).abs().max())
    return float((x.to(torch.float64) - y.to(torch.float64)).abs().max())


def _of_values(a: dict[str, str], b: dict[str, str]) -> Iterator[dict[str, Any]]:
    for name in dict.fromkeys([*a, *b]):
        entry = {"kind": "value", "name": name}
        if name not in a or name not in b:
            yield entry | {"what": f"only in the {'second' if name not in a else 'first'}"}
        elif a[name] != b[name]:
            yield entry | {"what": f"{a[name]:.60} became {b[name]:.60}"}


def _shaped(record: TensorRecord) -> str:
    return f"{record.dtype}[{', '.join(map(str, record.shape))}]"


def lines_of_difference(found: dict[str, Any]) -> list[str]:
    """The text that `diff` prints."""
    width = max((len(entry["name"]) for entry in found["different"]), default=0)
    lines = [f"{entry['name']:{width}}  {entry['what']}" for entry in found["different"]]
    summary = f"{found['same_tensors']} tensors are the same bit for bit"
    return [*lines, f"{summary}; {len(lines)} tensors or values differ"]


def describe_tensors(
    storage: Storage, path: str, patterns: list[str], progress: Progress
) -> dict[str, Any]:
    """Statistics of the tensors whose names match, and the whole text of such values."""
    checkpoint = open_checkpoint(storage, path)
    wanted = patterns or None
    names = [name for name in checkpoint.manifest.tensors if wanted_by(wanted, name)]
    count = Count(sum(_nbytes(checkpoint, name) for name in names), progress)
    tensors = {}
    for name in names:
        tensors[name] = _statistics(whole_tensor(storage, checkpoint, name))
        count.add(_nbytes(checkpoint, name))
    values = values_of(checkpoint.manifest.state)
    chosen = {name: text for name, text in values.items() if wanted_by(wanted, name)}
    return {"path": path, "tensors": tensors, "values": chosen}


def _statistics(tensor: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "first": [_text(x) for x in tensor.reshape(-1)[:4]],
    }
    if tensor.numel() and not tensor.is_complex():
        x = tensor.to(torch.float64)
        found |= {
            "min": _text(x.min()), "max": _text(x.max()), "mean": _text(x.mean()),
            "not_finite": int((~x.isfinite()).sum()),
        }  # fmt: skip
    return found


def _text(element: torch.Tensor) -> str:
    value = element.item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def lines_of_tensors(found: dict[str, Any]) -> list[str]:
    """The text that `show` prints."""
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
