"""`save_pretrained(model, folder)`: one parameter after another is gathered, and written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm.agreement import broadcast_text
from vescale_dtensor import DTensor

from vescale_parallel._common.agreement import everyone
from vescale_parallel._common.mesh import mesh_ranks
from vescale_parallel._common.messages import listed
from vescale_parallel._deferred.recording import real
from vescale_parallel._errors import PretrainedError
from vescale_parallel._pretrained.folder import SINGLE
from vescale_parallel._pretrained.model_mesh import mesh_of
from vescale_parallel._pretrained.name_match import SavedTensor, saved_tensors
from vescale_parallel._pretrained.weight_file import append, start_file
from vescale_parallel._untrusted import DTYPES, INDEX, MOST_DIMS, bytes_of_shape

MAX_BYTES: Final = 5_000_000_000
"""Bytes of tensors in one file, unless a single one is larger: Hugging Face's default."""

_UNFINISHED: Final = ".unfinished"


def save_pretrained(model: nn.Module, folder: str | Path, *, max_bytes: int = MAX_BYTES) -> None:
    """Save the weights of a model in Hugging Face's layout, for one device.

    Where the model is parallelised, all ranks call it: one parameter after another is gathered, and
    the lowest rank writes it. No rank holds more than one of them. Parameters that modules share
    are written once, under their first name. The files appear under their names when all are
    complete.
    A `config` of the model, as those of Hugging Face have, is saved besides.

    Args:
        model: plain, deferred or parallelised; names and values are those of one device.
        folder: made if it is not there; it must hold no weights yet.
        max_bytes: of the tensors in one file; several files get an index.

    Raises:
        PretrainedError: on every rank: there are weights in the folder, a dtype has no name in
            safetensors, or a file cannot be written.
    """
    root = Path(folder)
    tensors = saved_tensors(model)
    mesh = mesh_of(model)
    writer = _Writer(root, _files(tensors, max_bytes)) if _writes(mesh) else None
    problem = None if writer is None else writer.tried(lambda: _start(root, tensors))
    _require_fine(problem, mesh)
    for one in tensors:
        # Every rank takes part, also after rank 0 could not write: nobody waits for ever.
        values = one.tensor.full_tensor() if isinstance(one.tensor, DTensor) else real(one.tensor)
        if writer is not None:
            writer.write(one.names[0], values)
        # One at a time: before the next is gathered, this one is gone.
        del values
    if writer is not None:
        writer.finish(getattr(model, "config", None))
    _require_fine(None if writer is None else writer.problem, mesh)


def _writes(mesh: DeviceMesh | None) -> bool:
    # Of the mesh, which may be a part of the world.
    first = 0 if mesh is None else min(mesh_ranks(mesh))
    return not dist.is_initialized() or dist.get_rank() == first


def _require_fine(problem: Exception | None, mesh: DeviceMesh | None) -> None:
    """Raise on every rank what the one that writes found."""
    said = "" if problem is None else str(problem) or repr(problem)
    if mesh is not None:
        said = broadcast_text(said, min(mesh_ranks(mesh)), everyone(mesh))
    if said:
        raise PretrainedError(said) from problem


def _start(root: Path, tensors: list[SavedTensor]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    # Also unfinished ones, of a process that was killed.
    there = sorted(one.name for one in root.glob("*.safetensors*"))
    if there:
        raise PretrainedError(
            f"'{root}' holds weights already: {listed(there)}. Save to another folder, or remove "
            "them: files of two models side by side would be loaded as one."
        )
    odd = [one.names[0] for one in tensors if one.tensor.dtype not in DTYPES.values()]
    if odd:
        raise PretrainedError(f"safetensors has no name for the dtypes of {listed(odd)}.")
    for one in tensors:
        if bytes_of_shape(one.tensor.shape, one.tensor.element_size()) is None:
            raise PretrainedError(
                f"'{one.names[0]}' has {one.tensor.ndim} dims, {one.tensor.shape!s:.200}: "
                f"safetensors files hold at most {MOST_DIMS} dims and 2^62 bytes. Reshape it."
            )


def _files(tensors: list[SavedTensor], max_bytes: int) -> dict[str, list[SavedTensor]]:
    """The tensors of each file, in order."""
    groups: list[list[SavedTensor]] = [[]]
    size = 0
    for one in tensors:
        nbytes = one.tensor.numel() * one.tensor.element_size()
        # A tensor that is too large for any file has one of its own.
        if groups[-1] and size + nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    total = len(groups)
    return {f"model-{n:05}-of-{total:05}.safetensors": g for n, g in enumerate(groups, 1)}


class _Writer:
    """Rank 0's part: files that are written in the order of the tensors."""

    def __init__(self, root: Path, files: Mapping[str, list[SavedTensor]]) -> None:
        self.root, self.files = root, files
        self.problem: Exception | None = None
        self._left = list(files)
        self._opened: BinaryIO | None = None
        self._names: list[str] = []

    def tried(self, call: Any) -> Exception | None:
        """Do something; what goes wrong is kept, and nothing else is tried after it."""
        if self.problem is None:
            try:
                call()
            except Exception as error:  # whatever it is: the other ranks wait to hear of it
                self.problem = error
        return self.problem

    def write(self, name: str, values: Tensor) -> None:
        """Write the next tensor."""
        self.tried(lambda: self._write(name, values))

    def _write(self, name: str, values: Tensor) -> None:
        if not self._names:
            self._close()
            file = self._left.pop(0)
            own = {one.names[0]: one.tensor for one in self.files[file]}
            kinds = {key: (one.dtype, tuple(one.shape)) for key, one in own.items()}
            self._opened = start_file(self.root / (file + _UNFINISHED), kinds)
            self._names = list(own)
        assert self._opened is not None
        assert self._names.pop(0) == name
        append(self._opened, values)

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.flush()
            # Before the name is given: after a crash of the machine a file of that name is never a
            # half one.
            os.fsync(self._opened.fileno())
            self._opened.close()
        self._opened = None

    def finish(self, config: Any) -> None:
        """Give the files their names, and write the index."""
        self.tried(lambda: self._finish(config))
        if self.problem is not None:
            # Nothing that could be taken for weights is left.
            for file in self.files:
                (self.root / (file + _UNFINISHED)).unlink(missing_ok=True)

    def _finish(self, config: Any) -> None:
        self._close()
        for file in self.files:
            os.replace(self.root / (file + _UNFINISHED), self.root / file)
        if SINGLE not in self.files:
            own = [(one, file) for file, tensors in self.files.items() for one in tensors]
            sizes = [one.tensor.numel() * one.tensor.element_size() for one, _ in own]
            index = {
                "metadata": {"total_size": sum(sizes)},
                "weight_map": {one.names[0]: file for one, file in own},
            }
            # Last: with it the folder is one of weights, and all that it names is there.
            (self.root / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        save = getattr(config, "save_pretrained", None)
        if callable(save):
            save(self.root)
