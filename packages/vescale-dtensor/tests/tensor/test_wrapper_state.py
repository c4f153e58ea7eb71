"""What a wrapper has cached is dropped in one module, and nowhere else."""

import ast
from pathlib import Path

import vescale_dtensor

ROOT = Path(vescale_dtensor.__file__).parent
CACHED = {"_use_aliases", "_leaf_gradient", "_cached_redistribution"}


def drops(tree):
    """Each (line, attribute) of an assignment of None to what a wrapper caches."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (pair for target in targets for pair in _paired(target, node.value))
        if isinstance(node, ast.Delete):
            yield from _named(node)


def _paired(target, value):
    """`a, b = None, 1` assigns in pairs; `a = b = None` has several targets."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, other in zip(target.elts, value.elts, strict=True):
            yield from _paired(one, other)
    elif isinstance(value, ast.Constant) and value.value is None:
        yield from _named(target)


def _named(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in CACHED:
            yield node.lineno, node.attr


def test_what_a_wrapper_caches_is_dropped_in_one_module():
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in ROOT.rglob("*.py")
        for _, name in drops(ast.parse(path.read_text()))
    }
    assert {file for file, _ in found} == {"_tensor/state.py"}
    assert {name for _, name in found} == CACHED


def test_other_ways_to_drop_it_are_noticed():
    code = "a._use_aliases, b = None, 1\nx._leaf_gradient = y = None\ndel x._cached_redistribution"
    assert {name for _, name in drops(ast.parse(code))} == CACHED
