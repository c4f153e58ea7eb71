"""Whatever is changed in a file, it is read or refused by an error of ours, in bounded memory.

The corpus is the files that are made here, and the tables of hostile ones in the tests beside this.
"""

import contextlib
import io
import json
import random

import pytest
import torch
import vescale_ckpt as ckpt
from edited_checkpoint import generation_of
from mutations import bounded_memory, mutated
from torch.distributed import checkpoint as dcp
from vescale_ckpt._convert.dcp_metadata import parse_metadata
from vescale_ckpt._format.parse import parse_commit, parse_manifest
from vescale_ckpt._format.torch_file import read_torch_file
from vescale_ckpt._untrusted import parse_header, parse_index

STATE = {
    "w": torch.arange(6.0),
    "v": {"a": torch.ones(2, 2, dtype=torch.bfloat16), "n": [1, "x", None, 0.5]},
    "l": [torch.zeros(3), {"deep": (1, 2)}],
}


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of ours, one of DCP, and files of safetensors."""
    made = tmp_path_factory.mktemp("corpus")
    ckpt.save(made / "ours", STATE)
    ckpt.export_safetensors(made / "ours", made / "hf", shard_bytes=20)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({**STATE}, checkpoint_id=made / "dcp", no_dist=True)
    return made


def header_of(folder):
    content = next(folder.glob("*.safetensors")).read_bytes()
    return content[8 : 8 + int.from_bytes(content[:8], "little")]


# What is changed, and what reads it.
PARSERS = {
    "manifest": (
        lambda folder: [(generation_of(folder / "ours") / "manifest.json").read_bytes()],
        parse_manifest,
    ),
    "commit": (lambda folder: [(folder / "ours" / "COMMIT").read_bytes()], parse_commit),
    "header": (lambda folder: [header_of(folder / "hf")], parse_header),
    "index": (
        lambda folder: [
            (folder / "hf" / "model.safetensors.index.json").read_bytes(),
            json.dumps({"metadata": {"total_size": 1.5}, "weight_map": {"ä": "x"}}).encode(),
        ],
        parse_index,
    ),
    "DCP's metadata": (
        lambda folder: [(folder / "dcp" / ".metadata").read_bytes()],
        parse_metadata,
    ),
    "torch.save": (
        lambda folder: [
            saved(torch.ones(2, 3)[:, :2]),
            saved(torch.ones(2, dtype=torch.uint16)),
            saved({"a": [1, (2.5, None)], 3: torch.zeros(0), "s": torch.Size([1, 2])}),
        ],
        read_torch_file,
    ),
}


@pytest.mark.parametrize("rounds", [1000, pytest.param(50_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PARSERS)
def test_parsers(folder, name, rounds):
    files, parse = PARSERS[name]
    corpus, dice = files(folder), random.Random(49)
    with bounded_memory():
        for _ in range(rounds):
            # Ours are both of them: `FormatError` of the format, `ValueError` of what reads below.
            with contextlib.suppress(ckpt.FormatError, ValueError):
                parse(mutated(dice.choice(corpus), dice))


@pytest.mark.parametrize("rounds", [60, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["dcp", "hf"])
def test_importers(folder, tmp_path, kind, rounds):
    start, dice = ckpt.import_dcp if kind == "dcp" else ckpt.import_safetensors, random.Random(49)
    healthy = {file.name: file.read_bytes() for file in sorted((folder / kind).iterdir())}
    copy, target = tmp_path / kind, tmp_path / "out"
    copy.mkdir()
    for name, content in healthy.items():
        (copy / name).write_bytes(content)
    with bounded_memory():
        for _ in range(rounds):
            name = dice.choice([*healthy])
            (copy / name).write_bytes(mutated(healthy[name], dice))
            with contextlib.suppress(ckpt.CheckpointError):
                start(copy, target, overwrite=True)
                ckpt.verify(target)
            (copy / name).write_bytes(healthy[name])
