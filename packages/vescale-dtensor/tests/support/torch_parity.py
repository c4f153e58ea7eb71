"""Compares the public names of `torch.distributed.tensor` and its modules with those found here.

Run as a program it writes PARITY.md.
"""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

THEIRS, OURS = "torch.distributed.tensor", "vescale_dtensor"
MODULES = ("", "parallel", "experimental", "debug", "placement_types", "device_mesh")
# What users find at another place here.
PLACES = {"device_mesh": ""}
# What is missing or otherwise on purpose, and why.
REASONS: dict[str, str] = {}
TARGET = Path(__file__).parents[2] / "PARITY.md"


@dataclass(frozen=True)
class Row:
    """One public name of torch's, and how it stands here.

    Attributes:
        module, name: of torch's; a member of a class is `Class.member`.
        fault: what is missing or otherwise; empty if every legal call there means the same here.
        adds: parameters that only ours has.
    """

    module: str
    name: str
    fault: str = ""
    adds: tuple[str, ...] = field(default=())

    @property
    def key(self) -> str:
        return f"{self.module}.{self.name}".lstrip(".")


def rows() -> list[Row]:
    """Every public name of torch's modules, in their order."""
    found = []
    for module in MODULES:
        theirs = importlib.import_module(f"{THEIRS}.{module}".rstrip("."))
        ours = importlib.import_module(f"{OURS}.{PLACES.get(module, module)}".rstrip("."))
        for name in _public(theirs):
            found += _compared(module, name, getattr(theirs, name), getattr(ours, name, None))
    return found


def _public(module) -> list[str]:
    """The names that a module means to export."""
    return list(getattr(module, "__all__", [])) or [n for n in dir(module) if n[0] != "_"]


def _compared(module: str, name: str, theirs, ours) -> Iterator[Row]:
    """A name, and the members of a class."""
    if ours is None:
        yield Row(module, name, "missing")
        return
    if theirs is ours:
        yield Row(module, name)
        return
    yield Row(module, name, *_signatures(theirs, ours))
    if not inspect.isclass(theirs):
        return
    for member in _members(theirs):
        mine = inspect.getattr_static(ours, member, None)
        if mine is None:
            yield Row(module, f"{name}.{member}", "missing")
        elif callable(getattr(theirs, member)):
            difference = _signatures(getattr(theirs, member), getattr(ours, member))
            yield Row(module, f"{name}.{member}", *difference)
        else:
            yield Row(module, f"{name}.{member}")


def _members(cls: type) -> list[str]:
    """Public names that a class defines itself, or that bases of its own library do."""
    known = {name for base in (torch.Tensor, object) for name in dir(base)}
    # Modes have methods for torch itself.
    bases = [b for b in cls.__mro__ if "TorchDispatchMode" not in b.__name__]
    names = {name for base in bases for name in vars(base)}
    return sorted(n for n in names if not n.startswith("_") and n not in known)


def _signatures(theirs, ours) -> tuple[str, tuple[str, ...]]:
    """What legal calls of theirs are none of ours, and which parameters ours has beyond theirs."""
    try:
        wanted, found = _parameters(theirs), _parameters(ours)
    except (TypeError, ValueError):  # made in C++, which tells no signature
        return "", ()
    faults = []
    positional = [n for n, (kind, _) in wanted.items() if kind <= inspect._POSITIONAL_OR_KEYWORD]
    mine = [n for n, (kind, _) in found.items() if kind <= inspect._POSITIONAL_OR_KEYWORD]
    if mine[: len(positional)] != positional:
        faults.append(f"takes ({', '.join(mine)}) by position, not ({', '.join(positional)})")
    # Taken over by their names, and passed on to torch.
    anything = [n for n, (kind, _) in found.items() if kind is inspect._VAR_KEYWORD]
    for name, (kind, default) in wanted.items():
        if anything and name not in found and kind is inspect._KEYWORD_ONLY:
            continue
        if name not in found:
            faults.append(f"lacks `{name}`")
        elif not _equal(found[name][1], default):
            faults.append(f"`{name}={found[name][1]!r}`, not {default!r}")
        elif found[name][0] != kind:
            faults.append(f"`{name}` is {found[name][0].description}")
    required = [n for n in found if n not in wanted and found[n][1] is inspect._empty]
    needed = [n for n in required if n not in anything]
    faults += [f"needs `{name}`" for name in needed]
    ours_only = tuple(n for n in found if n not in wanted and n not in (*needed, *anything))
    return "; ".join(faults), ours_only


def _equal(first, second) -> bool:
    return first is second or first == second or str(first) == str(second)


def _parameters(function):
    every = inspect.signature(function).parameters.values()
    named = {p.name: (p.kind, p.default) for p in every if p.name not in ("self", "cls")}
    # Of classes whose bases are made in C++.
    if set(named) == {"args", "kwargs"} and inspect.isclass(function):
        raise ValueError
    return named


HEADER = """# torch.distributed.tensor, name by name

Written by `python tests/support/torch_parity.py` for torch {version}; a test compares it with the
installed torch. A script moves over by its imports: `torch.distributed.tensor` becomes
`vescale_dtensor`, `torch.distributed.tensor.parallel` becomes `vescale_dtensor.parallel`, and so
on.

{total} public names, members of classes included. {same} are here, and every legal call of them is
one here; {differ} differ{differences}

Parameters that only ours have: {adds}.
"""


def text() -> str:
    """PARITY.md for the installed torch."""
    every = rows()
    faulty = [row for row in every if row.fault]
    differences = [f"| `{row.key}` | {row.fault} | {REASONS.get(row.key, '')} |" for row in faulty]
    told = "\n".join([":\n", "| name | here | why |", "|---|---|---|", *differences])
    adds = ", ".join(f"`{row.key}({'=, '.join(row.adds)}=)`" for row in every if row.adds)
    lines = [
        HEADER.format(
            version=torch.__version__.partition("+")[0].rpartition(".")[0],
            total=len(every),
            same=len(every) - len(faulty),
            differ=len(faulty),
            differences=told if faulty else ".",
            adds=adds or "none",
        ).rstrip()
    ]
    for module in MODULES:
        title = f"{THEIRS}.{module}".rstrip(".")
        here = [row for row in every if row.module == module and not row.fault]
        lines += ["", f"## `{title}`", "", ", ".join(f"`{row.name}`" for row in here) + "."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
