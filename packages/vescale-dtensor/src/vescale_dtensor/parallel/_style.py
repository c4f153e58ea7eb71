"""`ParallelStyle`, and what all styles do: lay out a tensor, distribute the parameters of a layer.

Placements are kept as tuples of one, one entry for the one axis of the mesh.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._api.distribute_module import distribute_module
from vescale_dtensor._autograd.conversion import distribute_tensor
from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.derived_placements import as_placement
from vescale_dtensor._layout.layout import normalized
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._tensor.dtensor import DTensor

Placements = tuple[Placement, ...]


class ParallelStyle(ABC):
    """How one module is laid out over a mesh; subclass it, and define `_apply`.

    Attributes:
        src_data_rank: the rank of the mesh whose parameters are the right ones; None: those of
            every rank are, and nothing is sent. `parallelize_module` sets it.
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Change the module in place, and return it (or what takes its place)."""

    def __repr__(self) -> str:
        """Return the style with its arguments."""
        given = {n: v for n, v in vars(self).items() if n != "src_data_rank" and v is not None}
        return f"{type(self).__name__}({', '.join(f'{n}={v}' for n, v in given.items())})"


def placement_of(given: object) -> Placement:
    """Return a placement, ours or torch's, as one of ours.

    Raises:
        LayoutError: no placement.
    """
    return as_placement(given)


def laid_out(
    what: str,
    value: Any,
    mesh: DeviceMesh,
    found: Sequence[Placement],
    wanted: Sequence[Placement],
    shape: Callable[[Tensor], Sequence[int] | None] = lambda local: None,
) -> DTensor:
    """Return a tensor in a layout, as a DTensor.

    Args:
        what: the module it goes into or comes out of, for messages.
        value: a DTensor in any layout, or a plain tensor: this rank's local tensor.
        mesh: the mesh.
        found: the layout that a plain tensor has.
        wanted: the layout of the result.
        shape: the global shape of a plain tensor, where it can be told without asking other ranks.

    Raises:
        LayoutError: no tensor, or one whose local shape does not fit.
    """
    if not isinstance(value, Tensor):
        raise LayoutError(f"{what}: expected a tensor, found {type(value).__name__}")
    if isinstance(value, DTensor):
        made: DTensor = value
    else:
        made = DTensor.from_local(value, mesh, found, shape=shape(value))
    target = tuple(normalized(wanted, made.ndim))
    return made if made.placements == target else made.redistribute(placements=target)


def distribute_parameter(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: int | None
) -> None:
    """Make a parameter of a module a DTensor, in place. Collective, unless `source` is None."""
    parameter = module._parameters.get(name)
    if parameter is None:
        return
    distributed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
    wants_gradient = parameter.requires_grad
    module.register_parameter(name, nn.Parameter(distributed, requires_grad=wants_gradient))


def distribute_layer(
    module: nn.Module,
    mesh: DeviceMesh,
    partition: Callable[[nn.Module], None],
    enter: Callable[[Any], Any],
    leave: Callable[[Any], Any],
) -> nn.Module:
    """`distribute_module` with functions of the one input and the output of a layer.

    Args:
        module: the layer.
        mesh: the mesh.
        partition: distributes the parameters of one submodule.
        enter: of the first input; further ones are left as they are.
        leave: of the output.
    """

    def entering(called: nn.Module, inputs: Any, _: DeviceMesh) -> Any:
        # A plain tensor that went past here would count as replicated, whatever it is.
        if not inputs:
            raise LayoutError(
                f"{type(called).__name__} has a parallel style, which lays out its first input: "
                "pass that by position, not by name"
            )
        return (enter(inputs[0]), *inputs[1:])

    return distribute_module(
        module,
        mesh,
        lambda name, submodule, _: partition(submodule),
        entering,
        lambda called, outputs, _: leave(outputs),
    )
