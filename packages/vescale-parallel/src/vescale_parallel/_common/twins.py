"""Twins of modules, which compute with other tensors in the place of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def local_twin(module: nn.Module, own: Mapping[str, Tensor], experts: int | None = None) -> Any:
    """Return a module that computes as this one does, with these tensors as its parameters.

    It shares everything else with the module, which is left as it is: whatever is raised in it,
    there is nothing to put back.

    Args:
        module: any.
        own: by the names of its parameters, those of modules inside it too.
        experts: of a module of experts, how many there are here; None: as many as it has.
    """
    twin = _twin(module, "", own)
    if experts is not None:
        twin.num_experts = experts
    return twin


def _twin(module: nn.Module, prefix: str, own: Mapping[str, Tensor]) -> Any:
    # Shallow, and at each call: parameters are other tensors then, as units gather them anew. Not
    # by `copy`, which modules with parametrizations refuse.
    twin = object.__new__(type(module))
    vars(twin).update(vars(module))
    vars(twin).pop("forward", None)
    for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
        # As an attribute of the object: Python finds it before it asks for parameters.
        vars(twin)[name] = own[f"{prefix}{name}"]
    # Under every name, also where it is one module.
    children = {
        name: None if child is None else _twin(child, f"{prefix}{name}.", own)
        for name, child in module._modules.items()
    }
    vars(twin).update(children)
    # Lists and dicts of modules look there.
    twin._modules = children
    return twin
