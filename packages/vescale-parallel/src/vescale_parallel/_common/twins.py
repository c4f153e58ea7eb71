"""Twins of modules, which compute with other tensors in the place of their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor, nn
from vescale_comm.nested import named_tensors_within

from vescale_parallel._errors import ParallelError

_NOTHING: Final = object()


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


def take_over_attributes(module: nn.Module, twin: Any, name: str) -> None:
    """Assign to a module what a call assigned to its twin, as a number of calls.

    Raises:
        ParallelError: see `assigned_attributes`.
    """
    for owner, at, value in assigned_attributes(module, twin, name):
        setattr(owner, at, value)


def assigned_attributes(
    module: nn.Module, twin: Any, name: str
) -> list[tuple[nn.Module, str, Any]]:
    """Return what a call assigned to the twin of a module: modules, attributes, values.

    Raises:
        ParallelError: tensors are among it, which are those of one rank.
    """
    found = list(_assigned(module, twin, ""))
    tensors = [full for _, at, full, value in found if named_tensors_within(value, at)]
    if tensors:
        raise ParallelError(
            f"{name}: it keeps tensors in attributes, {tensors}, which would be of each rank's own "
            "rows. Return them."
        )
    return [(owner, at, value) for owner, at, _, value in found]


def _assigned(
    module: nn.Module, twin: Any, prefix: str
) -> Iterator[tuple[nn.Module, str, str, Any]]:
    own = vars(module)
    placed = {*module._parameters, *module._modules, "_modules"}
    for name, value in vars(twin).items():
        if name not in placed and own.get(name, _NOTHING) is not value:
            yield module, name, prefix + name, value
    for name, child in module._modules.items():
        if child is not None:
            yield from _assigned(child, twin._modules[name], f"{prefix}{name}.")
