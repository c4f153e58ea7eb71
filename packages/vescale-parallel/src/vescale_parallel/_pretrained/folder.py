"""The weights of a folder as Hugging Face writes them: one file, or an index of several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from vescale_parallel._common.messages import listed
from vescale_parallel._errors import PretrainedError
from vescale_parallel._pretrained.weight_file import Stored, read_header

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"


def stored_in(folder: Path) -> dict[str, Stored]:
    """The tensors of a folder by name; headers are read, and no elements.

    Raises:
        PretrainedError: there are no weights, or a file is missing or broken.
    """
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise PretrainedError(
                f"no weights in '{folder}': it has neither {SINGLE} nor {INDEX}. Pass a folder as "
                "save_pretrained writes it, with safetensors files."
            )
        return read_header(folder / SINGLE)
    try:
        files = json.loads(index.read_text())["weight_map"]
        # Each file once, however many of the tensors lie in it.
        names = sorted(set(files.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PretrainedError(f"'{index}' is no index of weights: {error!r}") from error
    found = {name: read_header(folder / name) for name in names}
    # Before anything is loaded: an index that outlived one of its files would leave tensors as they
    # were.
    lost = [name for name, file in files.items() if name not in found[file]]
    if lost:
        raise PretrainedError(f"'{index}' names {listed(lost)}, which are not in their files.")
    return {name: found[file][name] for name, file in files.items()}
