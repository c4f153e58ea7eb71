"""Counts lines of code: no blank lines, no comments, no docstrings."""

from __future__ import annotations

import ast
import io
import tokenize

_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """How many lines of a file hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {
        line
        for token in tokens
        if token.type not in _NOT_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - _docstring_lines(source))


def _docstring_lines(source: str) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        for child in getattr(node, "body", None) or []:
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                found.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    return found
