"""Public names that were changed: they go on working, with a warning."""

import warnings

from vescale_rng._layout.layout import ShardLayout

# `Layout` is what vescale-dtensor calls a mesh with placements: one name, two meanings.
_RENAMED = {"Layout": ShardLayout}


def renamed(module: str, name: str) -> type:
    """Return what a former name of a module stands for; for the module's `__getattr__`.

    Raises:
        AttributeError: the module never had such a name.
    """
    if name not in _RENAMED:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    now = _RENAMED[name]
    # Level 3: the line that asked for the name, behind the module's `__getattr__`.
    message = f"{module}.{name} is called {now.__name__} now; the former name will be removed"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return now
