"""Counts the lines that a user writes to train Llama 3 in parallel, and what TorchTitan's keeps.

python -m tools.code_lines

A code line holds code: blank lines, comments and docstrings are not counted, imports are. Both of
our programs are run by `tools/tests/test_code_lines.py`, on the same model as one device.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent / "user_code"
_SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# Counted in the same way in TorchTitan's repository: the functions on the path of Llama 3 with
# tensor, fully sharded and pipeline parallelism, and the imports of their files. First what lies
# in the model's folder, which a user keeps for a model; then with the shared helpers on the path.
TORCHTITAN = {
    "2025-09-01 (78d431438)": (306, 527),
    "2026-08-21": (94, 913),
}
CUT = 0.784  # "78.4 % less code", arXiv 2509.07003
# What our programs say for it in place of `zero=3`. TorchTitan's figures are those of the last row,
# and its functions have the branches of the rows above in them.
ROWS = {
    "TP + SP": (),
    "TP + SP + ZeRO-3": ("zero=3",),
    "TP + SP + ZeRO-3 + checkpointing": ("zero=3", 'checkpoint="full"'),
    "TP + SP + ZeRO-3 + PP": ("zero=3", 'pipeline="1f1b"', "microbatches=2"),
}


def code_lines(source: str) -> int:
    """Return lines of Python that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    held = {
        line
        for token in tokens
        if token.type not in _SILENT
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(held - _docstrings(ast.parse(source)))


def _docstrings(tree: ast.AST) -> set[int]:
    """Return the lines of all docstrings."""
    found: set[int] = set()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            found.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def programs() -> dict[str, str]:
    """Return our programs by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(HERE.glob("by_*.py"))}


def with_words(source: str, words: Sequence[str]) -> str:
    """Return the same program with these words of a plan in place of `zero=3`."""
    lines = "".join(f"    {word},\n" for word in words)
    said = source.replace("    zero=3,\n", lines)
    said = said.replace(", zero=3", "".join(f", {word}" for word in words))
    # Stages lie on an axis of their own; the step is `forward_backward` then, in the user's loop.
    piped = any(word.startswith("pipeline") for word in words)
    return said.replace("mesh(dp=-1", "mesh(pp=2, dp=-1") if piped else said


def table() -> str:
    """Return the table as Markdown."""
    ours = programs()
    heads = ["lines of the user", *(name.replace("_", " ") for name in ours)]
    heads += [f"TorchTitan {when}" for when in TORCHTITAN]
    theirs = [f"{folder} ({path} with helpers)" for folder, path in TORCHTITAN.values()]
    rows = [heads, ["---"] * len(heads)]
    for what, words in ROWS.items():
        own = [str(code_lines(with_words(text, words))) for text in ours.values()]
        rows.append([what, *own, *(theirs if what.endswith("PP") else ["in the last row"] * 2)])
    folder = TORCHTITAN["2025-09-01 (78d431438)"][0]
    goal = f"{CUT:.1%} less than {folder} is {round(folder * (1 - CUT))} lines."
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + f"\n\n{goal}"


if __name__ == "__main__":
    print(table())
