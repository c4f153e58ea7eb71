"""The weights of a folder as Hugging Face writes them: one file, or an index of several."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from vescale_parallel._common.messages import listed
from vescale_parallel._errors import PretrainedError
from vescale_parallel._pretrained.weight_file import FileTensor, stored_tensors
from vescale_parallel._untrusted import INDEX, MOST_HEADER, parse_index, read_small

SINGLE: Final = "model.safetensors"


def stored_in(folder: Path) -> dict[str, FileTensor]:
    """The tensors of a folder by name; headers are read, and no elements.

    Raises:
        PretrainedError: there are no weights, or a file is missing or broken.
    """
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise PretrainedError(
                f"no weights in '{folder}': it has neither {SINGLE} nor {INDEX}. Pass a folder as "
                "save_pretrained writes it, with safetensors files."
            )
        return stored_tensors(folder / SINGLE)
    try:
        files = parse_index(read_small(index, MOST_HEADER))
    except (OSError, ValueError) as error:
        raise PretrainedError(
            f"'{index}' is no index of weights: {error}. Copy or download it again."
        ) from error
    # Each file once, however many of the tensors lie in it.
    found = {name: stored_tensors(folder / name) for name in sorted(set(files.values()))}
    # Before anything is loaded: an index that outlived one of its files would leave tensors as they
    # were.
    lost = [name for name, file in files.items() if name not in found[file]]
    if lost:
        raise PretrainedError(f"'{index}' names {listed(lost)}, which are not in their files.")
    return {name: found[file][name] for name, file in files.items()}
