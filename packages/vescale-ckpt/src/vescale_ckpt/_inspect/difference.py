"""Compares two checkpoints: names, shapes, values, and how far elements are apart."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from vescale_ckpt._format import strict_json
from vescale_ckpt._format.manifest import Manifest, TensorRecord
from vescale_ckpt._inspect.inspect import read_full_tensor, values_of
from vescale_ckpt._load.open import Checkpoint, open_checkpoint
from vescale_ckpt._progress import ByteCounter, Progress
from vescale_ckpt._storage.base import Storage
from vescale_ckpt._storage.resolve import resolve, storage_of
from vescale_ckpt._tensors.boxes import byte_view


class _Side(NamedTuple):
    """One of the two checkpoints, with the storage that it is in."""

    storage: Storage
    path: str
    checkpoint: Checkpoint

    @property
    def manifest(self) -> Manifest:
        return self.checkpoint.manifest


def describe_difference(first: str, second: str, progress: Progress) -> dict[str, Any]:
    """Find every tensor and value that is not bit for bit the same; two tensors at a time.

    Args:
        first: path of a checkpoint.
        second: path of another, possibly in another storage.
        progress: told of the bytes that were compared.
    """
    a, b = _opened(first), _opened(second)
    found: list[dict[str, Any]] = []
    names = list(dict.fromkeys([*a.manifest.tensors, *b.manifest.tensors]))
    count = ByteCounter(sum(_nbytes(a, name) + _nbytes(b, name) for name in names), progress)
    for name in names:
        found += _of_tensor(a, b, name)
        count.add(_nbytes(a, name) + _nbytes(b, name))
    values_a, values_b = (_texts(side) for side in (a, b))
    found += list(_of_values(values_a, values_b))
    same = len(names) - sum(entry["kind"] == "tensor" for entry in found)
    return {"first": a.path, "second": b.path, "same_tensors": same, "different": found}


def _opened(path: str) -> _Side:
    storage, target = storage_of(path), resolve(path)
    return _Side(storage, target, open_checkpoint(storage, target))


def _nbytes(side: _Side, name: str) -> int:
    record = side.manifest.tensors.get(name)
    return sum(chunk.nbytes for chunk in record.chunks) if record is not None else 0


def _of_tensor(a: _Side, b: _Side, name: str) -> list[dict[str, Any]]:
    one, other = a.manifest.tensors.get(name), b.manifest.tensors.get(name)
    entry: dict[str, Any] = {"kind": "tensor", "name": name}
    if one is None or other is None:
        return [entry | {"what": f"only in the {'second' if one is None else 'first'}"}]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return [entry | {"what": f"{_shaped(one)} became {_shaped(other)}"}]
    x, y = (read_full_tensor(side.storage, side.checkpoint, name) for side in (a, b))
    # As bits: nan is the same as itself, and 0.0 is not -0.0.
    differs = (
        (byte_view(x) != byte_view(y)).view(x.numel(), -1).any(1)
        if x.numel()
        else torch.zeros(0, device="cpu")
    )
    count = int(differs.sum())
    if not count:
        return []
    largest = _largest(x.reshape(-1)[differs], y.reshape(-1)[differs])
    what = f"{count} of {x.numel()} elements differ, by at most {largest:.6g}"
    return [entry | {"what": what, "elements": count, "largest": strict_json.number(largest)}]


def _largest(x: torch.Tensor, y: torch.Tensor) -> float:
    if x.is_complex():
        return float((x.to(torch.complex128) - y.to(torch.complex128)).abs().max())
    return float((x.to(torch.float64) - y.to(torch.float64)).abs().max())


def _texts(side: _Side) -> dict[str, str]:
    # As text: nan is the same as itself, and True is not 1.
    return {name: repr(value) for name, value in values_of(side.manifest.state).items()}


def _of_values(a: dict[str, str], b: dict[str, str]) -> Iterator[dict[str, Any]]:
    for name in dict.fromkeys([*a, *b]):
        entry = {"kind": "value", "name": name}
        if name not in a or name not in b:
            yield entry | {"what": f"only in the {'second' if name not in a else 'first'}"}
        elif a[name] != b[name]:
            yield entry | {"what": f"{a[name]:.60} became {b[name]:.60}"}


def _shaped(record: TensorRecord) -> str:
    return f"{record.dtype}[{', '.join(map(str, record.shape))}]"
