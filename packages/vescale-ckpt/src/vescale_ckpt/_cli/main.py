"""`python -m vescale_ckpt`: look at checkpoints from a shell."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from vescale_ckpt._cli.output import (
    json_of,
    json_of_root,
    json_of_statistics,
    lines_of,
    lines_of_difference,
    lines_of_root,
    lines_of_tensors,
)
from vescale_ckpt._convert.dcp_import import import_dcp
from vescale_ckpt._convert.safetensors_export import export_safetensors
from vescale_ckpt._convert.safetensors_import import import_safetensors
from vescale_ckpt._errors import CheckpointError, without_password
from vescale_ckpt._inspect.difference import describe_difference
from vescale_ckpt._inspect.inspect import inspect
from vescale_ckpt._inspect.verify import verify
from vescale_ckpt._progress import progress_line
from vescale_ckpt._storage.commit_lookup import has_commit
from vescale_ckpt._storage.resolve import resolve, storage_of
from vescale_ckpt._version import __version__

_EPILOG = """\
examples:
  python -m vescale_ckpt ls runs/mine                    every checkpoint in a directory
  python -m vescale_ckpt ls runs/mine/step-00000100      every tensor and value of one
  python -m vescale_ckpt ls --json runs/mine | jq .      the same for a program
  python -m vescale_ckpt show runs/mine/step-00000100 'optim/*'
  python -m vescale_ckpt verify runs/mine/step-00000100  read every byte against its checksum
  python -m vescale_ckpt diff runs/mine/step-00000100 runs/mine/step-00000200
  python -m vescale_ckpt export --at model runs/mine/step-00000100 huggingface
  python -m vescale_ckpt import --at model huggingface runs/other/step-00000000

A checkpoint is a directory with a COMMIT file. The data files in it are safetensors files, and
manifest.json beside them says which part of which tensor each holds. Nothing is ever unpickled.

exit status: 0 all is well; 1 there is no checkpoint, it is damaged, or (diff) the two differ;
2 wrong usage.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        found, lines = options.run(options)
    except CheckpointError as error:
        if options.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        else:
            print(_printable(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return 1
    _print(
        json.dumps(found, indent=2, allow_nan=False)
        if options.json
        else _printable("\n".join(lines))
    )
    return 1 if found.get("different") else 0


def _print(text: str) -> None:
    try:
        print(without_password(text), flush=True)
    except BrokenPipeError:
        # Who reads has seen enough (`| head`). What Python itself would flush goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _printable(text: str) -> str:
    """Escape what could control a terminal: names come from files."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vescale_ckpt",
        description="Look at checkpoints and check them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vescale-ckpt {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, run, summary, places in _COMMANDS:
        command = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        for place, words in places.items():
            many = "*" if place == "names" else None
            command.add_argument(place, help=words, nargs=many)
        if name in ("export", "import"):
            command.add_argument("--at", default="", metavar="NAME", help=_AT[name])
        if name == "import":
            command.add_argument("--overwrite", action="store_true", help="replace what is there")
        command.add_argument("--json", action="store_true", help="print JSON for a program to read")
        command.set_defaults(run=run)
    return parser


_Found = tuple[dict[str, Any], list[str]]


def _ls(options: argparse.Namespace) -> _Found:
    storage, target = storage_of(options.path), resolve(options.path)
    if storage.is_directory(target) and not has_commit(storage, target):
        root = json_of_root(storage, target)
        if root["checkpoints"]:
            return root, lines_of_root(root)
    found = json_of(inspect(target))
    return found, lines_of(found)


def _show(options: argparse.Namespace) -> _Found:
    line = progress_line(f"reading {options.path}")
    names = options.names or None
    found = json_of_statistics(inspect(options.path, only=names, statistics=True, progress=line))
    return found, lines_of_tensors(found)


def _verify(options: argparse.Namespace) -> _Found:
    line = progress_line(f"verifying {os.path.basename(resolve(options.path))}")
    done = verify(options.path, progress=line)
    found = {
        "path": done.path,
        "ok": True,
        "tensors": done.tensors,
        "files": done.files,
        "bytes": done.nbytes,
    }
    size = f"{done.nbytes:,} bytes"
    return found, [f"ok: {done.tensors} tensors in {done.files} files, {size}, all as saved"]


def _diff(options: argparse.Namespace) -> _Found:
    found = describe_difference(options.path, options.other, progress_line("comparing"))
    return found, lines_of_difference(found)


def _export(options: argparse.Namespace) -> _Found:
    line = progress_line(f"exporting to {options.folder}")
    done = export_safetensors(options.path, options.folder, at=options.at, progress=line)
    found = {"files": done.files, "tensors": done.tensors, "bytes": done.nbytes}
    return found, [f"{done.tensors} tensors, {done.nbytes:,} bytes", *done.files]


def _import(options: argparse.Namespace) -> _Found:
    source, path = options.source, options.path
    line = progress_line(f"importing {source}")
    if os.path.exists(os.path.join(source, ".metadata")):
        tensors = import_dcp(source, path, overwrite=options.overwrite, progress=line)
        kind = "DCP"
    else:
        tensors = import_safetensors(
            source, path, under=options.at, overwrite=options.overwrite, progress=line
        )
        kind = "safetensors"
    found = {"path": resolve(path), "from": kind, "tensors": tensors}
    return found, [f"{tensors} tensors from {kind} in {found['path']}"]


_ONE = {"path": "a checkpoint"}
_AT = {
    "export": "export what is below this name, such as model",
    "import": "the key of the dict that the tensors go into",
}
_COMMANDS: tuple[tuple[str, Callable[[argparse.Namespace], _Found], str, dict[str, str]], ...] = (
    ("ls", _ls, "list the checkpoints in a directory, or what is in one checkpoint",
     {"path": "a checkpoint, or a directory that holds some"}),
    ("show", _show, "show values, and the least, mean, largest and first elements of tensors",
     {**_ONE, "names": "globs of the names to show, such as 'optim/*'; all by default"}),
    ("verify", _verify, "read a whole checkpoint and compare every byte with its checksum", _ONE),
    ("diff", _diff, "compare two checkpoints bit by bit, whatever their layouts",
     {**_ONE, "other": "another checkpoint"}),
    ("export", _export, "write the tensors as Hugging Face's safetensors files",
     {**_ONE, "folder": "where to; must not exist"}),
    ("import", _import, "make a checkpoint of safetensors files, or of a DCP checkpoint",
     {"source": "a safetensors file or folder, or a DCP checkpoint", "path": "the checkpoint"}),
)  # fmt: skip
