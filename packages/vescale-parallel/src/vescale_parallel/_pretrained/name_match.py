"""Matches tensors of a model with those of a folder, and lists everything that differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from vescale_parallel._common.messages import count, dtype_name, listed
from vescale_parallel._errors import PretrainedError
from vescale_parallel._pretrained.weight_file import FileTensor


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a model that is saved, under all the names it has there."""

    names: tuple[str, ...]
    tensor: Tensor


def saved_tensors(model: nn.Module) -> list[SavedTensor]:
    """Parameters and persistent buffers, each once, in the order of `state_dict`."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    # With `keep_vars` the parameters themselves: detached ones would be new objects, and nobody
    # could tell which are shared.
    for name, one in model.state_dict(keep_vars=True).items():
        if isinstance(one, Tensor):
            names.setdefault(id(one), []).append(name)
            tensors[id(one)] = one
    return [SavedTensor(tuple(names[key]), one) for key, one in tensors.items()]


def match_names(
    tensors: list[SavedTensor], stored: Mapping[str, FileTensor], folder: object, *, cast: bool
) -> list[tuple[SavedTensor, tuple[FileTensor, ...]]]:
    """Each tensor with what is stored of it; several where a shared one is stored under two names.

    Raises:
        PretrainedError: names that are missing or too many, other shapes, other dtypes.
    """
    pairs = [(one, tuple(stored[n] for n in one.names if n in stored)) for one in tensors]
    known = {name for one in tensors for name in one.names}
    missing = [" = ".join(one.names) for one, found in pairs if not found]
    unexpected = [name for name in stored if name not in known]
    problems = []
    if missing:
        problems.append(f"{count(len(missing), 'tensor')} of the model are missing: ")
        problems[-1] += listed(missing)
    if unexpected:
        problems.append(f"{count(len(unexpected), 'tensor')} are not in the model: ")
        problems[-1] += listed(unexpected)
    for one, found in pairs:
        for of_one in found:
            shape, dtype = tuple(one.tensor.shape), one.tensor.dtype
            if of_one.shape != shape:
                problems.append(f"'{of_one.name}' has shape {of_one.shape}, the model's {shape}")
            elif of_one.dtype != dtype and not (cast and of_one.dtype.is_floating_point
                                                and dtype.is_floating_point):  # fmt: skip
                hint = "or pass cast=True" if not cast else "as only floating point is cast"
                problems.append(
                    f"'{of_one.name}' is {dtype_name(of_one.dtype)}, the model's "
                    f"{dtype_name(dtype)}: build the model in that dtype, {hint}"
                )
    if problems:
        # Of another architecture every tensor is wrong: the first few tell which.
        shown = problems[:8] + [f"and {len(problems) - 8} more"] * (len(problems) > 8)
        head = f"the weights in '{folder}' are not those of the model, and nothing was loaded:"
        raise PretrainedError("\n  - ".join([head, *shown]))
    return pairs
