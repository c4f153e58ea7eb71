"""`parallelize_module`: gives submodules their styles by name; shared parameters stay shared."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._errors import LayoutError, MeshError
from vescale_dtensor._layout.mesh import current_mesh, describe
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor.parallel._style import ParallelStyle

# A parameter that several modules hold, and where: (module, its name there).
Places = list[tuple[nn.Module, str]]


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Distribute a module over a mesh, as a plan says. Collective.

    The signature is that of `torch.distributed.tensor.parallel.parallelize_module`.

    Args:
        module: the module; it is changed in place.
        device_mesh: a mesh of one axis: `mesh["tp"]` of a larger one. Default: that of the
            enclosing `with mesh:`.
        parallelize_plan: a style for the module, or styles by the names of submodules. Parts of a
            name may be patterns (`"layers.*.attention"`, `"*_proj"`), and `""` is the module
            itself.
        src_data_rank: the rank of the mesh whose parameters are distributed; None: each rank's own
            are taken, and nothing is sent.

    Returns:
        The module. Parameters that submodules share stay shared.

    Raises:
        LayoutError: submodules share a parameter that their styles distribute differently.
        MeshError: a mesh of several axes, or none.
        TypeError: a plan that is none.

    Warns:
        UserWarning: a name that no submodule has, or no plan.
    """
    mesh = device_mesh if device_mesh is not None else current_mesh("parallelize_module")
    if mesh.ndim != 1:
        names = [f'mesh["{name}"]' for name in mesh.mesh_dim_names or ()]
        raise MeshError(
            f"parallelize_module takes a mesh of one axis, found {describe(mesh)}: "
            f"pass {' or '.join(names) or 'a slice of it'}"
        )
    if parallelize_plan is None:
        warnings.warn("parallelize_module: no plan was given, so nothing is done", stacklevel=2)
        return module
    if not isinstance(parallelize_plan, ParallelStyle | Mapping):
        raise TypeError(
            "parallelize_module: a plan is a ParallelStyle or a dict of them, found "
            f"{type(parallelize_plan).__name__}"
        )
    shared = _shared_parameters(module)
    plan = parallelize_plan
    if isinstance(plan, ParallelStyle):
        plan = {"": plan}
    for name, style in plan.items():
        found = list(_matching(module, name.split(".") if name else []))
        if not found:
            warnings.warn(
                f"parallelize_module: no submodule of {type(module).__name__} is called {name!r}; "
                "this entry of the plan is skipped",
                stacklevel=2,
            )
        for parent, attribute, submodule in found:
            style.src_data_rank = src_data_rank
            made = style._apply(submodule, mesh)
            if parent is None:
                module = made
            elif made is not submodule:
                parent._modules[attribute] = made
    _share_again(shared)
    return module


def _matching(
    module: nn.Module, tokens: list[str], parent: nn.Module | None = None, attribute: str = ""
) -> Iterator[tuple[nn.Module | None, str, nn.Module]]:
    """Submodules whose names match patterns, one for each level, with what holds them."""
    if not tokens:
        yield parent, attribute, module
        return
    for name, child in list(module.named_children()):
        if fnmatchcase(name, tokens[0]):
            yield from _matching(child, tokens[1:], module, name)


def _shared_parameters(module: nn.Module) -> list[tuple[nn.Parameter, Places]]:
    """Plain parameters that lie in several places of a module."""
    found: dict[int, tuple[nn.Parameter, Places]] = {}
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                # The parameter is kept as well: freed, its id could become that of another.
                found.setdefault(id(parameter), (parameter, []))[1].append((submodule, name))
    return [entry for entry in found.values() if len(entry[1]) > 1]


def _share_again(shared: list[tuple[nn.Parameter, Places]]) -> None:
    """Put one distributed parameter into all places that held one plain parameter.

    Raises:
        LayoutError: styles distributed it differently.
    """
    for _, places in shared:
        now = [module._parameters[name] for module, name in places]
        made = [p for p in now if isinstance(p, DTensor)]
        if not made:
            continue
        layouts = {p.placements: p for p in made}
        if len(layouts) > 1:
            where = [f"{type(module).__name__}.{name}" for module, name in places]
            raise LayoutError(
                f"parallelize_module: {', '.join(where)} are one parameter, which their styles "
                f"distribute as {' and '.join(map(str, map(list, layouts)))}: give them styles "
                "that shard the same dim"
            )
        for module, name in places:
            module.register_parameter(name, made[0])
