"""`load_pretrained(model, folder)`: each rank reads what it stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from vescale_comm.agreement import by_ranks, gather_failures
from vescale_dtensor import DTensor
from vescale_dtensor.storage import local_leaf
from vescale_rng import ShardLayout, as_layout, whole

from vescale_parallel._common.agreement import everyone, require_same
from vescale_parallel._common.mesh import mesh_ranks
from vescale_parallel._deferred.recording import DeferredTensor, fill_with
from vescale_parallel._deferred.tape import Fill
from vescale_parallel._errors import PretrainedError
from vescale_parallel._pretrained.folder import stored_in
from vescale_parallel._pretrained.model_mesh import mesh_of
from vescale_parallel._pretrained.name_match import SavedTensor, match_names, saved_tensors
from vescale_parallel._pretrained.weight_file import FileTensor, fill_from_file

Model = TypeVar("Model", bound=nn.Module)

_ADVICE = {
    "weights": "Let the folder be the same on every rank.",
    "problem": "Mend that, on all ranks alike.",
}


def load_pretrained(model: Model, folder: str | Path, *, cast: bool = False) -> Model:
    """Load the weights of a Hugging Face folder into a model, in place, and return it.

    Every rank reads the elements that it stores, and no others, in a scratch of a few megabytes. A
    model of `deferred()` reads nothing yet: `parallelize` then makes each rank's elements of these
    values, and the initial ones are never drawn. The random generator stays where it is.

    Where the model is parallelised, all ranks call it.

    Args:
        model: plain, deferred or parallelised. Its names are those of the files; what modules share
            may be stored under any of its names.
        folder: with `model.safetensors`, or `model.safetensors.index.json` and the files it names.
        cast: convert values that are stored in another dtype than the model's.

    Raises:
        PretrainedError: before anything is changed, on every rank: files are missing or broken, or
            names, shapes or dtypes are not those of the model. While loading, on every rank: a
            file cannot be read, or a tensor that modules share is stored twice with other values.
        DisagreementError: before anything is changed, on every rank: their folders differ, in what
            they hold or in samples of the values.
    """
    tensors, problem = [], None
    stored: dict[str, FileTensor] = {}
    pairs: list[tuple[SavedTensor, tuple[FileTensor, ...]]] = []
    try:
        tensors = saved_tensors(model)
        _require_memory(tensors)
        stored = stored_in(Path(folder))
        pairs = match_names(tensors, stored, folder, cast=cast)
    except Exception as error:  # whatever it is, the other ranks must hear of it before it leaves
        problem = error
    mesh = mesh_of(model)
    if mesh is not None:
        facts = {
            # By samples of the values: names and shapes of two checkpoints of one model are the
            # same.
            "weights": {n: f"{one}, sample {one.sample:08x}" for n, one in stored.items()},
            "problem": {} if problem is None else {type(problem).__name__: str(problem)},
        }
        head = "load_pretrained was not given the same on all ranks, and has changed nothing:"
        require_same(facts, peers=mesh_ranks(mesh), head=head, advice=_ADVICE, mesh=mesh)
    if problem is not None:
        raise problem
    try:
        for one, found in pairs:
            _load_and_compare(one.tensor, found)
    except Exception as error:  # one rank's disk may fail
        problem = error
    # Also of ranks that read all they wanted: a collective, to which those whose disk failed come,
    # too.
    failed = {} if mesh is None else gather_failures(problem, everyone(mesh))
    if problem is not None:
        raise problem
    if failed:
        told = by_ranks(failed.values(), failed)
        raise PretrainedError(
            f"the weights could not be read on {told}. The model holds some of them only."
        )
    return model


def _load_and_compare(tensor: Tensor, found: Sequence[FileTensor]) -> None:
    """Load what is stored of a tensor, which may be there under several names."""
    for other in found[1:]:
        _require_same_values(other, found[0])
    _load(tensor, found[0])


def _require_memory(tensors: list[SavedTensor]) -> None:
    """Refuse a model on the meta device, which would stay without values.

    Raises:
        PretrainedError: a tensor has no memory, and is not one of `deferred()`.
    """
    for one in tensors:
        if one.tensor.device.type == "meta" and not isinstance(one.tensor, DeferredTensor):
            raise PretrainedError(
                f"'{one.names[0]}' is on the meta device, which holds no values. Build the model "
                "under `with deferred():`, or call model.to_empty(device=...) first."
            )


@dataclass(frozen=True)
class FromFile(Fill):
    """The values of a stored tensor, as a function of a tensor that gets them."""

    stored: FileTensor

    def fill(self, local: Tensor, layout: ShardLayout) -> None:
        """See `Fill.fill`."""
        fill_from_file(self.stored, layout, local)

    @property
    def summary(self) -> str:
        """See `Fill.summary`: without the path, which may be another one on another machine."""
        stored = self.stored
        return f"{stored.file.name} {stored.name} {stored}, sample {stored.sample:08x}"


def _load(tensor: Tensor, stored: FileTensor) -> None:
    # Nothing is read: the file becomes the last step of what makes its values.
    if isinstance(tensor, DeferredTensor):
        fill_with(tensor, FromFile(stored))
    elif isinstance(tensor, DTensor):
        # Its version counts the write, so that what is gathered is gathered anew; also where this
        # rank has no element of it.
        local = local_leaf(tensor).detach()
        fill_from_file(stored, as_layout(tensor.__vescale_layout__()), local)
        with torch.no_grad():
            local[:0].zero_() if local.ndim else local.add_(0)
    elif tensor.is_contiguous():
        fill_from_file(stored, whole(tensor.shape), tensor.detach())
    else:
        # Layouts are of row-major memory: by way of a copy that is.
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        fill_from_file(stored, whole(tensor.shape), made)
        with torch.no_grad():
            tensor.detach().copy_(made)


def _require_same_values(one: FileTensor, other: FileTensor) -> None:
    """Refuse a shared tensor whose names have other values; read on every rank, whole, by rows."""
    rows = one.shape[0] if one.shape else 1
    for row in range(rows):
        values = [_row(stored, row) for stored in (one, other)]
        if not torch.equal(*values):
            raise PretrainedError(
                f"'{one.name}' and '{other.name}' are one tensor in the model, and are stored with "
                "different values. Untie them, or remove one of them from the files."
            )


def _row(stored: FileTensor, row: int) -> Tensor:
    shape = (1, *stored.shape[1:]) if stored.shape else ()
    layout = whole(shape)
    box = layout.boxes[0] if layout.boxes else None
    if box is None:
        return torch.empty(0, device="cpu")
    moved = type(box)((row, *[0] * (len(shape) - 1)) if shape else (), shape, 0, box.local_strides)
    made = torch.empty(shape, dtype=stored.dtype, device="cpu")
    fill_from_file(stored, ShardLayout(stored.shape, (moved,)), made)
    return made
