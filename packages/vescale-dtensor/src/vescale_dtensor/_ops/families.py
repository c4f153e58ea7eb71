"""All families of operators, and `install`, which registers what they define."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path

from vescale_dtensor._dispatch import registry
from vescale_dtensor._ops.tensor import memory_identity, metadata, pickling, to_python, unsupported

# Every module in the folders beside this one. It may have `RULES`, function -> rule, or `HANDLERS`,
# function -> handler, or both. Found and not listed, so that a new file needs no entry here.
_MODULES = tuple(
    import_module(found.name)
    for found in pkgutil.walk_packages([str(Path(__file__).parent)], f"{__package__}.")
    if found.name != __name__
)

# What they handle only asks about a tensor, or is refused: no rule could answer for it.
_NO_OPERATORS = (memory_identity, metadata, pickling, to_python, unsupported)


def install() -> None:
    """Fill the tables of the dispatcher; refuses a function that two families answer for."""
    for module in _MODULES:
        registry.install(
            getattr(module, "RULES", {}),
            getattr(module, "HANDLERS", {}),
            constant=metadata.CONSTANT,
            operators=module not in _NO_OPERATORS,
        )
