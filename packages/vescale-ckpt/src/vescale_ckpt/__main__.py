"""`python -m vescale_ckpt`: look at checkpoints from a shell."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from vescale_ckpt._commit import resolve
from vescale_ckpt._errors import CheckpointError
from vescale_ckpt._inspect import describe, describe_root, lines_of, lines_of_root
from vescale_ckpt._open import is_committed
from vescale_ckpt._progress import terminal_line
from vescale_ckpt._storage import LocalStorage
from vescale_ckpt._verify import verify
from vescale_ckpt._version import __version__

_EPILOG = """\
examples:
  python -m vescale_ckpt ls runs/mine                    every checkpoint in a directory
  python -m vescale_ckpt ls runs/mine/step-00000100      every tensor and value of one
  python -m vescale_ckpt ls --json runs/mine | jq .      the same for a program
  python -m vescale_ckpt verify runs/mine/step-00000100  read every byte against its checksum

A checkpoint is a directory with a COMMIT file. The data files in it are safetensors files, and
manifest.json beside them says which part of which tensor each holds. Nothing is ever unpickled.

exit status: 0 all is well; 1 there is no checkpoint, or it is damaged; 2 wrong usage.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        found, lines = options.run(options.path)
    except CheckpointError as error:
        if options.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        else:
            print(_printable(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return 1
    print(json.dumps(found, indent=2) if options.json else _printable("\n".join(lines)))
    return 0


def _printable(text: str) -> str:
    """Names come from files: one must not be able to send control codes to a terminal."""
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
    for name, run, summary in (
        ("ls", _ls, "list the checkpoints in a directory, or what is in one checkpoint"),
        ("verify", _verify, "read a whole checkpoint and compare every byte with its checksum"),
    ):
        command = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        command.add_argument("path", help="a checkpoint, or (ls) a directory that holds some")
        command.add_argument("--json", action="store_true", help="print JSON for a program to read")
        command.set_defaults(run=run)
    return parser


def _ls(path: str) -> tuple[Any, list[str]]:
    storage, target = LocalStorage(), resolve(path)
    if storage.is_directory(target) and not is_committed(storage, target):
        root = describe_root(storage, target)
        if root["checkpoints"]:
            return root, lines_of_root(root)
    found = describe(storage, target)
    return found, lines_of(found)


def _verify(path: str) -> tuple[Any, list[str]]:
    done = verify(path, progress=terminal_line(f"verifying {os.path.basename(resolve(path))}"))
    found = {
        "path": done.path,
        "ok": True,
        "tensors": done.tensors,
        "files": done.files,
        "bytes": done.nbytes,
    }
    size = f"{done.nbytes:,} bytes"
    return found, [f"ok: {done.tensors} tensors in {done.files} files, {size}, all as saved"]


if __name__ == "__main__":
    sys.exit(main())
